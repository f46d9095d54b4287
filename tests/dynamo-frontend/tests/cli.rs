// SPDX-License-Identifier: Apache-2.0

//! The program from outside: exit codes, the one line of a refusal, and the environment, which
//! only a process of its own can set safely.

use std::process::{Command, Output};

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
        refused(&["--kserve-grpc-server"], &[]),
        "--kserve-grpc-server is an option of Dynamo's Python frontend that this binary does not \
         support"
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
