// SPDX-License-Identifier: Apache-2.0

//! The program from outside: exit codes, the one line of a refusal, and the environment, which
//! only a process of its own can set safely.

use std::fs;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::process::{self, Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

fn run(args: &[&str], variables: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvdelta-frontend"))
        .args(args)
        .env_clear()
        .envs(variables.iter().copied())
        .output()
        .expect("the program runs")
}

/// The reason of a refusal; asserts code 2 and one line.
fn refused(args: &[&str], variables: &[(&str, &str)]) -> String {
    let output = run(args, variables);
    let text = String::from_utf8(output.stderr).expect("text");
    assert_eq!(
        output.status.code(),
        Some(2),
        "{args:?} {variables:?}: {text}"
    );
    let lines: Vec<_> = text.lines().collect();
    let [line] = lines[..] else {
        panic!("one line: {text}");
    };
    line.strip_prefix("error: ").expect("error: ...").to_owned()
}

const WEIGHT: &str = "DYN_ROUTER_DECODE_OVERLAP_SCORE_WEIGHT";

#[test]
fn bad_variables_are_refused_by_the_name_of_the_variable() {
    for variable in [
        WEIGHT,
        "DYN_ROUTER_TEMPERATURE",
        "DYN_ROUTER_TTL_SECS",
        "DYN_HTTP_PORT",
        "DYN_KV_CACHE_BLOCK_SIZE",
        "DYN_ROUTER_MIN_INITIAL_WORKERS",
        "DYN_OVERLAP_SCORE_WEIGHT",
    ] {
        for value in ["", "-1", "NaN", "inf", "1,5", "many"] {
            let line = refused(&[], &[(variable, value)]);
            assert!(line.starts_with(variable), "{line}");
            assert!(line.ends_with(&format!("got {value:?}")), "{line}");
        }
    }
    let line = refused(&[], &[("DYN_ROUTER_USE_KV_EVENTS", "maybe")]);
    assert!(line.starts_with("DYN_ROUTER_USE_KV_EVENTS "), "{line}");
    let line = refused(&[], &[("DYN_ROUTER_MODE", "best")]);
    assert!(line.starts_with("DYN_ROUTER_MODE "), "{line}");
}

#[test]
fn a_flag_beats_its_variable() {
    // The bad variable is not looked at, the bad flag is.
    let line = refused(&["--http-port", "x"], &[("DYN_HTTP_PORT", "y")]);
    assert_eq!(
        line,
        "--http-port must be a whole number from 0 to 65535, got \"x\""
    );

    // Good variable, flag that turns it off: the next refusal is another one.
    let variables = [(WEIGHT, "0.5"), ("DYN_ROUTER_MODE", "random")];
    let line = refused(&["--router-prefill-load-model=ais"], &variables);
    assert!(
        line.contains(WEIGHT) || line.contains("AISimulate"),
        "{line}"
    );
    let args = [
        "--router-decode-overlap-score-weight=0",
        "--router-prefill-load-model=ais",
    ];
    assert!(refused(&args, &variables).contains("AISimulate"));
}

#[test]
fn a_negated_switch_beats_its_variable() {
    let variables = [("DYN_SERVE_INDEXER", "true")];
    assert!(refused(&[], &variables).contains("--serve-indexer requires"));
    let args = ["--no-serve-indexer", "--router-prefill-load-model=ais"];
    assert!(refused(&args, &variables).contains("AISimulate"));
}

#[test]
fn the_first_of_two_variables_counts() {
    let both = [
        ("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "x"),
        ("DYN_OVERLAP_SCORE_WEIGHT", "y"),
    ];
    let line = refused(&[], &both);
    assert!(
        line.starts_with("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT "),
        "{line}"
    );
}

#[test]
fn options_of_pythons_frontend_are_refused_by_name() {
    assert_eq!(
        refused(&["--interactive"], &[]),
        "--interactive is an option of Dynamo's Python frontend that this binary does not support; \
         see docs/frontend.md"
    );
}

#[test]
fn variables_of_refused_options_are_not_ignored_in_silence() {
    // No planes can be set up with this, so the program ends after its warnings.
    let variables = [
        ("DYN_CHAT_PROCESSOR", "vllm"),
        ("DYN_ENFORCE_DISAGG", "1"),
        ("DYN_DISCOVERY_BACKEND", "mem"),
        ("DYN_RUNTIME_NUM_WORKER_THREADS", "none"),
    ];
    let output = run(&[], &variables);
    let text = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("DYN_CHAT_PROCESSOR"), "{text}");
    assert!(text.contains("DYN_ENFORCE_DISAGG"), "{text}");
}

/// A frontend that serves, ended when dropped.
struct Serving {
    child: Child,
}

impl Serving {
    /// Starts it, and waits until it listens on every port.
    fn start(mut command: Command, ports: &[u16]) -> Self {
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program runs");
        let mut serving = Self { child };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !ports
            .iter()
            .all(|port| TcpStream::connect(("127.0.0.1", *port)).is_ok())
        {
            let ended = serving.child.try_wait().expect("its state");
            assert_eq!(ended, None);
            assert!(Instant::now() < deadline, "does not listen on {ports:?}");
            sleep(Duration::from_millis(50));
        }
        serving
    }

    /// Asks it to end and returns its exit code and log.
    fn terminate(mut self) -> (Option<i32>, String) {
        let asked = Command::new("kill")
            .arg(self.child.id().to_string())
            .status();
        assert!(asked.expect("kill runs").success());
        let mut log = String::new();
        let mut output = self.child.stderr.take().expect("piped");
        output.read_to_string(&mut log).expect("text");
        let status = self.child.wait().expect("its end");
        (status.code(), log)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A frontend of its own process, with logs that a test can read.
fn frontend(args: &[&str], variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvdelta-frontend"));
    command
        .args(["--discovery-backend=mem", "--http-host=127.0.0.1"])
        .args(args)
        .env_clear()
        .env("DYN_SDK_DISABLE_ANSI_LOGGING", "1")
        .envs(variables.iter().copied());
    command
}

/// Of the tests that run side by side, none gets another's port: the program listens later on it.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let next = process::id().wrapping_add(NEXT.fetch_add(1, Relaxed));
        // Below the range from which systems take ports on their own.
        let port = 20_000 + u16::try_from(next % 12_000).expect("below 12000");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

#[test]
fn it_ends_well_when_asked_and_said_its_weight_and_who_gave_it() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let policy = "worker_selection:\n  decode: tuned\n  instances:\n    - name: tuned\n      \
                  type: dynamo-default-cost-fn\n      parameters: {}\n";
    fs::write(file.path(), policy).expect("written");
    let file = file.path().to_str().expect("text");
    let flag = "--router-decode-overlap-score-weight=0";
    let kv = "--router-mode=kv";
    for (args, variables, source) in [
        (vec![kv, flag], vec![(WEIGHT, "0")], &flag[..flag.len() - 2]),
        (vec![kv], vec![(WEIGHT, "0")], WEIGHT),
        (vec![kv, "--router-policy-config", file], vec![], "not set"),
        (vec![flag], vec![], "off without --router-mode=kv"),
    ] {
        let port = free_port();
        let mut command = frontend(&args, &variables);
        command.args(["--http-port", &port.to_string()]);
        let (code, log) = Serving::start(command, &[port]).terminate();
        assert_eq!(code, Some(0), "{log}");
        let line = log.lines().find(|line| line.contains("Frontend starts"));
        let line = line.unwrap_or_else(|| panic!("{log}"));
        assert!(line.contains("decode_overlap_score_weight=0"), "{line}");
        assert!(line.contains(&format!("source=\"{source}\"")), "{line}");
    }
}

#[cfg(kvdelta_patched)]
#[test]
fn a_weight_of_the_policy_file_is_said_with_the_file() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let policy = "worker_selection:\n  decode: tuned\n  instances:\n    - name: tuned\n      \
                  type: dynamo-default-cost-fn\n      parameters:\n        \
                  decode_overlap_score_weight: 1.5\n";
    fs::write(file.path(), policy).expect("written");
    let file = file.path().to_str().expect("text");
    let port = free_port();
    let mut command = frontend(&["--router-mode=kv", "--router-policy-config", file], &[]);
    command.args(["--http-port", &port.to_string()]);
    let (code, log) = Serving::start(command, &[port]).terminate();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("decode_overlap_score_weight=1.5"), "{log}");
    assert!(log.contains(&format!("source=\"{file}\"")), "{log}");
}

#[test]
fn kserve_grpc_has_a_port_of_its_own_for_metrics() {
    let ports = [free_port(), free_port()];
    let mut command = frontend(&["--kserve-grpc-server"], &[]);
    command
        .args(["--http-port", &ports[0].to_string()])
        .env("DYN_GRPC_METRICS_PORT", ports[1].to_string());
    let (code, log) = Serving::start(command, &ports).terminate();
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn the_limit_of_open_files_is_raised_unless_told_otherwise() {
    for (variables, soft) in [
        (vec![], "8192"),
        (vec![("DYN_FRONTEND_FD_LIMIT_TARGET", "0")], "256"),
    ] {
        let port = free_port();
        let program = frontend(&[], &variables);
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", "ulimit -Sn 256; exec \"$0\" \"$@\""])
            .arg(program.get_program())
            .args(program.get_args())
            .args(["--http-port", &port.to_string()])
            .env_clear()
            .envs(variables);
        let serving = Serving::start(command, &[port]);
        let limits = fs::read_to_string(format!("/proc/{}/limits", serving.child.id()));
        let limits = limits.expect("limits");
        let line = limits.lines().find(|line| line.contains("open files"));
        let line = line.expect("a limit of open files");
        let fields: Vec<_> = line.split_whitespace().collect();
        let [found, hard] = [fields[3], fields[4]];
        // A lower hard limit is the most that can be had.
        assert!(found == soft || found == hard && hard != "256", "{line}");
    }
}

#[test]
fn a_port_in_use_is_an_error() {
    let taken = std::net::TcpListener::bind("0.0.0.0:0").expect("a port");
    let port = taken.local_addr().expect("its address").port().to_string();
    let output = run(&["--discovery-backend=mem", "--http-port", &port], &[]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn help_and_version_end_well() {
    for flag in ["--help", "-h", "--version"] {
        let output = run(&[flag], &[]);
        assert_eq!(output.status.code(), Some(0), "{flag}");
        assert!(output.stderr.is_empty(), "{flag}");
    }
}
