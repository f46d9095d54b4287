// SPDX-License-Identifier: Apache-2.0

//! Format, lints and all tests.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser};

use crate::beside;
use crate::cache::{Cache, members, project_root};
use crate::claims;
use crate::command::{output, shown_run};
use crate::counts::Count;
use crate::demo;
use crate::env;
use crate::export_pr;
use crate::faults;
use crate::frontend;
use crate::interrupt;
use crate::live_claims;
use crate::live_index;
use crate::patch;
use crate::progress::{Step, say};
use crate::report::{DecodeEvents, Measured, Report};
use crate::unchanged;
use crate::upstream_tests;
use crate::wheel;
use crate::workers;

/// The engine test accepts this much above "every prefix once".
const TOLERANCE: f64 = 0.05;

/// Options of `cargo xtask test`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask test --fast     seconds to minutes
  cargo xtask test            everything, real engines among it
  cargo xtask test --only \"fed by real engines\"
  cargo xtask test --each-patch --json results.json
                              upstream's tests before the series and after each patch of it,
                              for `cargo xtask export-pr --results results.json`")]
pub(crate) struct Options {
    /// Leave out what needs the engines or Dynamo's big crates.
    #[arg(long)]
    fast: bool,
    /// Run only the parts with this in their name.
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["fast", "each_patch"])]
    only: Option<String>,
    /// Run upstream's tests alone: on the unpatched sources, then after each patch of the series.
    /// A test that a patch breaks, removes or ignores is a failure.
    #[arg(long, conflicts_with = "fast")]
    each_patch: bool,
    /// Write the results of --each-patch to this file; `-` is the standard output.
    #[arg(long, value_name = "FILE", requires = "each_patch")]
    json: Option<PathBuf>,
}

/// One part of the tests.
struct Part {
    name: &'static str,
    /// Whether `--fast` leaves it out.
    heavy: bool,
    run: fn(&Cache) -> Result<()>,
}

const PARTS: [Part; 22] = [
    Part {
        name: "format",
        heavy: false,
        run: format,
    },
    Part {
        name: "lints",
        heavy: false,
        run: lints,
    },
    Part {
        name: "tests of the workspace",
        heavy: false,
        run: workspace_tests,
    },
    Part {
        name: "patch series applies",
        heavy: false,
        run: patch::check,
    },
    Part {
        name: "each phase as a pull request",
        heavy: false,
        run: export_pr::check,
    },
    Part {
        name: "lints of the Python files",
        heavy: false,
        run: python_lints,
    },
    Part {
        name: "tests of the Python module",
        heavy: false,
        run: wheel::check,
    },
    Part {
        name: "tests of the package for vLLM",
        heavy: true,
        run: wheel::test_vllm,
    },
    Part {
        name: "tests of the package for SGLang",
        heavy: true,
        run: wheel::test_sglang,
    },
    Part {
        name: "upstream's tests on the patched crates",
        heavy: true,
        run: patched_upstream_tests,
    },
    Part {
        name: "upstream's tests on the patched workers",
        heavy: true,
        run: workers::test,
    },
    Part {
        name: "lints and tests of the frontend",
        heavy: true,
        run: frontend_tests,
    },
    Part {
        name: "replay beside Dynamo's",
        heavy: true,
        run: beside::simulation,
    },
    Part {
        name: "off equals unpatched",
        heavy: true,
        run: unchanged::check,
    },
    Part {
        name: "claims on a mock fleet",
        heavy: true,
        run: claims::check,
    },
    Part {
        name: "the index fed by real engines",
        heavy: true,
        run: live_index::check,
    },
    Part {
        name: "claims in real engines",
        heavy: true,
        run: live_claims::check,
    },
    Part {
        name: "claims in SGLang workers",
        heavy: true,
        run: wheel::test_sglang_fleet,
    },
    Part {
        name: "faults in real engines",
        heavy: true,
        run: faults::check,
    },
    Part {
        name: "early release in real engines",
        heavy: true,
        run: faults::check_release,
    },
    Part {
        name: "tensor parallelism in real engines",
        heavy: true,
        run: faults::check_ranks,
    },
    Part {
        name: "the main job on real engines",
        heavy: true,
        run: engines,
    },
];

/// Runs `cargo xtask test`. Every part runs, also after one that failed.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    if options.each_patch {
        return each_patch(cache, options.json.as_deref());
    }
    let (mut passed, mut skipped, mut failed) = (0, Vec::new(), Vec::new());
    let wanted = options.only.as_deref().unwrap_or_default();
    let parts = PARTS.iter().filter(|part| part.name.contains(wanted));
    for part in parts {
        if options.fast && part.heavy {
            say(format!("{}: left out by --fast", part.name));
            skipped.push(part.name);
            continue;
        }
        interrupt::check()?;
        let step = Step::begin(part.name);
        match (part.run)(cache) {
            Ok(()) => {
                step.end();
                passed += 1;
            }
            Err(error) => {
                say(format!("FAILED {}: {error:#}", part.name));
                failed.push(part.name);
            }
        }
    }
    if passed + failed.len() + skipped.len() == 0 {
        let names: Vec<_> = PARTS.iter().map(|part| part.name).collect();
        bail!(
            "--only: no part has {wanted:?} in its name: {}",
            names.join(", ")
        );
    }
    for name in &skipped {
        println!("skipped: {name} (--fast)");
    }
    for name in &failed {
        println!("failed: {name}");
    }
    println!(
        "{passed} passed, {} failed, {} skipped",
        failed.len(),
        skipped.len()
    );
    Ok(if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs `cargo xtask test --each-patch`.
fn each_patch(cache: &Cache, json: Option<&Path>) -> Result<ExitCode> {
    let to_stdout = json == Some(Path::new("-"));
    // Before the run: an hour of tests must not end in a path that cannot be written.
    let file = match json {
        Some(path) if !to_stdout => Some((
            path,
            File::create(path)
                .with_context(|| format!("--json: cannot write {}", path.display()))?,
        )),
        _ => None,
    };
    let results = upstream_tests::each_patch(cache)?;
    let text = format!("{}\n", serde_json::to_string_pretty(&results)?);
    if let Some((path, mut file)) = file {
        file.write_all(text.as_bytes())
            .with_context(|| format!("--json: cannot write {}", path.display()))?;
    }
    if to_stdout {
        print!("{text}");
        eprint!("{}", results.table());
    } else {
        print!("{}", results.table());
    }
    upstream_tests::require_good(&results)?;
    Ok(ExitCode::SUCCESS)
}

fn cargo(arguments: &[&str]) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(arguments).current_dir(project_root());
    cargo
}

fn format(_: &Cache) -> Result<()> {
    shown_run(cargo(&["fmt", "--all", "--check"]))?;
    for folder in [frontend::folder(), unchanged::folder()] {
        let mut apart = cargo(&["fmt", "--check"]);
        apart.current_dir(folder);
        shown_run(apart)?;
    }
    Ok(())
}

/// Cargo on the workspace. What it builds is kept in the cache, so that a second clone builds only the crates
/// of the workspace.
pub(crate) fn workspace_cargo(cache: &Cache, arguments: &[&str]) -> Result<Command> {
    let mut cargo = cargo(arguments);
    cargo.env("CARGO_TARGET_DIR", cache.target("workspace", &members())?);
    frontend::without_own_package(&mut cargo);
    Ok(cargo)
}

fn lints(cache: &Cache) -> Result<()> {
    // Without what only the wheel has, then with it: that links no test, for which Python would be needed.
    for scope in [
        &["--workspace", "--all-targets"][..],
        &["--package=kvdelta-transfer", "--features=python"],
    ] {
        let mut clippy = workspace_cargo(cache, &["clippy", "--quiet", "--locked"])?;
        clippy.args(scope).args(["--", "--deny", "warnings"]);
        shown_run(clippy)?;
    }
    Ok(())
}

fn workspace_tests(cache: &Cache) -> Result<()> {
    shown_run(workspace_cargo(
        cache,
        &["test", "--quiet", "--locked", "--workspace"],
    )?)?;
    // The one ignored test of the workspace; its reason does not show in a quiet run.
    let mut etcd = Command::new("etcd");
    etcd.arg("--version");
    if let Err(error) = output(etcd) {
        say(format!(
            "skipped: 1 test, the doctor on a real etcd (needs etcd 3.4 or newer in PATH: {error:#})"
        ));
        return Ok(());
    }
    shown_run(workspace_cargo(
        cache,
        &[
            "test",
            "--quiet",
            "--locked",
            "--package=kvdelta",
            "--",
            "--ignored",
        ],
    )?)
}

fn python_lints(cache: &Cache) -> Result<()> {
    let python = env::tools(cache)?;
    let stub = wheel::crate_folder();
    let packages = [wheel::vllm_folder(), wheel::sglang_folder()];
    for folder in [env::engines_folder(), stub.clone()]
        .iter()
        .chain(&packages)
    {
        for arguments in [
            &["ruff", "check", "."][..],
            &["ruff", "format", "--check", "."],
            &["mypy", "."],
        ] {
            let mut linter = Command::new(&python);
            linter.arg("-m").args(arguments).current_dir(folder);
            if *folder != stub {
                linter.env("MYPYPATH", &stub);
            }
            shown_run(linter)?;
        }
    }
    Ok(())
}

/// Upstream's tests of the crates that the series touches, after the last patch.
fn patched_upstream_tests(cache: &Cache) -> Result<()> {
    let results = upstream_tests::whole_series(cache)?;
    print!("{}", results.table());
    upstream_tests::require_good(&results)
}

fn frontend_tests(cache: &Cache) -> Result<()> {
    let mut tests = frontend::cargo(cache, "test")?;
    // Clippy as the compiler of this one crate: `cargo clippy` would check 850 crates again.
    tests
        .arg("--quiet")
        .env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver");
    shown_run(tests)
}

/// The main job, small, with a decode worker that is killed on the way, and the same by `kvdelta replay`.
fn engines(cache: &Cache) -> Result<()> {
    #[derive(Debug, Parser)]
    struct Small {
        #[command(flatten)]
        options: demo::Options,
    }
    let trace = tempfile::NamedTempFile::new()?;
    let mut small = Small::parse_from([
        "demo",
        "--prefixes=2",
        "--requests-per-prefix=3",
        "--turns=3",
        "--kill-decode",
        "--doctor",
    ]);
    small.options.trace = Some(trace.path().to_owned());
    let report = demo::measure(cache, &small.options)?;
    print!("{}", report.table());
    let mut failures = broken_promises(&report);
    failures.extend(beside::engines(cache, &report, trace.path())?);
    if !failures.is_empty() {
        bail!("{}", failures.join("; "));
    }
    Ok(())
}

/// What a report with one request in flight must show and does not.
fn broken_promises(report: &Report) -> Vec<String> {
    let mut broken = Vec::new();
    if !report.outputs_are_right() {
        broken.push("an answer is not that of the aggregated worker".to_owned());
    }
    for run in &report.runs {
        let on = run.routing.weight > 0.0;
        let wants_events = on || run.routing.conditional_disagg;
        if (run.decode_events == DecodeEvents::Subscribed) != wants_events {
            broken.push(format!(
                "{run}: the router has {:?} the decode workers' KV events",
                run.decode_events
            ));
        }
        // With weight 0 and with an unpatched frontend the events are not taken: all it may find.
        let expected = if wants_events {
            &[][..]
        } else {
            &["decode-events-not-taken"]
        };
        if run.doctor.as_ref().is_some_and(|codes| codes != expected) {
            broken.push(format!("{run}: the doctor says {:?}", run.doctor));
        }
        for measured in &run.workloads {
            let limit = measured.once_bytes as f64 * (1.0 + TOLERANCE);
            if on && measured.moved_bytes as f64 > limit {
                broken.push(format!(
                    "{run}, {:?}: {} bytes moved, every prefix once is {}",
                    measured.workload, measured.moved_bytes, measured.once_bytes
                ));
            }
            // Several caches cannot hold more than one without end; less was not counted.
            if !run.routing.conditional_disagg && measured.moved_bytes < measured.once_bytes {
                broken.push(format!(
                    "{run}, {:?}: {} bytes counted, at least {} must move",
                    measured.workload, measured.moved_bytes, measured.once_bytes
                ));
            }
            if run.connector {
                broken.extend(
                    broken_claims(measured)
                        .into_iter()
                        .map(|what| format!("{run}, {:?}: {what}", measured.workload)),
                );
            }
        }
        if let Some(kill) = &run.kill {
            let all = report.prefill_workers + report.decode_workers;
            if kill.event_sources != [all, all - 1, all] {
                broken.push(format!(
                    "of {all} workers, one killed on the way, the router took the events of {:?}",
                    kill.event_sources
                ));
            }
            if !kill.index_was_cleared {
                broken.push("the killed worker's blocks stayed in the index".to_owned());
            }
            if kill.requests_after_restart == 0 {
                broken.push("the decode worker was not used after its restart".to_owned());
            }
        }
    }
    broken
}

/// What claims must show where one request follows another and every cache has room.
fn broken_claims(measured: &Measured) -> Vec<String> {
    let count = |count| measured.counts.get(count).unwrap_or(0);
    let mut broken = Vec::new();
    for some in [Count::Claims, Count::SkippedBlocks, Count::LeasesHeld] {
        if count(some) == 0 {
            broken.push(format!("no {some:?}"));
        }
    }
    for none in [
        Count::RefusedClaims,
        Count::VoidClaims,
        Count::StaleClaims,
        Count::StaleBlocks,
        Count::Failed,
        Count::LeasesLost,
    ] {
        if count(none) > 0 {
            broken.push(format!("{} {none:?}", count(none)));
        }
    }
    for (what, should) in [
        (Count::SkippedClaims, count(Count::Claims)),
        (Count::ConfirmedClaims, count(Count::Claims)),
        (Count::ReadBytes, measured.moved_bytes),
        (Count::SkippedBlocks, count(Count::ClaimedBlocks)),
    ] {
        if count(what) != should {
            broken.push(format!("{what:?} is {}, not {should}", count(what)));
        }
    }
    broken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outputs::Tally;
    use crate::report::Kill;
    use crate::report::tests::report;

    #[test]
    fn a_report_that_keeps_every_promise_passes() {
        assert_eq!(broken_promises(&report(0)), Vec::<String>::new());
    }

    #[test]
    fn each_broken_promise_is_found() {
        let mut wrong = report(1);
        wrong.runs[0].decode_events = DecodeEvents::Subscribed;
        wrong.runs[0].doctor = Some(Vec::new());
        wrong.runs[0].workloads[0].moved_bytes = 299;
        wrong.runs[1].workloads[0].moved_bytes = 316;
        wrong.runs[1].kill = Some(Kill {
            requests: 4,
            failed_attempts: 0,
            event_sources: [3, 3, 3],
            index_was_cleared: false,
            requests_after_restart: 0,
            outputs: Tally::default(),
        });
        let broken = broken_promises(&wrong);
        assert_eq!(broken.len(), 8, "{broken:?}");
    }

    #[test]
    fn claims_that_did_not_hold_are_found() {
        let mut wrong = report(0);
        let counts = &mut wrong.runs[2].workloads[0].counts.0;
        counts.insert(Count::StaleClaims, 1);
        counts.insert(Count::SkippedBlocks, 0);
        counts.insert(Count::ReadBytes, 299);
        counts.remove(&Count::ConfirmedClaims);
        // No blocks are skipped, which is also not what was claimed.
        let broken = broken_promises(&wrong);
        assert_eq!(broken.len(), 5, "{broken:?}");
        assert!(broken[0].starts_with("connector, SharedPrefixes: no SkippedBlocks"));
    }

    #[test]
    fn five_percent_above_once_is_accepted() {
        let mut close = report(0);
        close.runs[1].workloads[0].moved_bytes = 315;
        assert_eq!(broken_promises(&close), Vec::<String>::new());
    }
}
