// SPDX-License-Identifier: Apache-2.0

//! These run without DYN_* variables; `tests/cli.rs` sets them for a process of its own.

use super::*;

/// Written by `tests/engines/python_options.py`: spellings, variable, default, choices.
const PYTHON: &str = include_str!("../../tests/python-options-1.6.1.tsv");

fn read(args: &[&str]) -> Result<Options, String> {
    let argv = std::iter::once("kvdelta-frontend").chain(args.iter().copied());
    parse(argv.map(OsString::from)).map_err(|stop| match stop {
        Stop::Show(text) => text.to_string(),
        Stop::Refuse(reason) => reason.to_string(),
    })
}

fn refusal(args: &[&str]) -> String {
    read(args).map(|_| ()).expect_err("refused")
}

#[test]
fn the_command_line_is_well_formed() {
    command().debug_assert();
}

#[test]
fn every_option_of_pythons_frontend_is_here_or_refused_by_name() {
    let mut command = command();
    command.build();
    for line in PYTHON.lines() {
        let [spellings, variable, default, choices] = line.split('\t').collect::<Vec<_>>()[..]
        else {
            panic!("four columns: {line:?}");
        };
        for spelling in spellings.split(',') {
            let long = spelling.trim_start_matches('-');
            let found = command.get_arguments().find(|arg| {
                arg.get_long() == Some(long)
                    || arg.get_aliases().unwrap_or_default().contains(&long)
            });
            let Some(arg) = found else {
                assert!(unsupported::refusal(spelling).is_some(), "{spelling}");
                continue;
            };
            // The negative form has neither of these.
            if spelling.starts_with("--no-") || spelling == "--router-prefill-load-model" {
                continue;
            }
            if !variable.is_empty() {
                let ours = arg.get_env().and_then(|name| name.to_str());
                assert_eq!(ours, Some(variable), "variable of {spelling}");
            }
            let ours: Vec<_> = arg.get_default_values().iter().collect();
            let theirs: Vec<_> = Some(default)
                .filter(|text| !text.is_empty())
                .into_iter()
                .collect();
            assert_eq!(ours, theirs, "default of {spelling}");
            if !choices.is_empty() && !arg.is_hide_set() {
                let ours = arg.get_possible_values();
                let ours: Vec<_> = ours.iter().map(|value| value.get_name()).collect();
                assert_eq!(ours.join(","), choices, "choices of {spelling}");
            }
        }
    }
}

#[test]
fn an_option_that_is_not_pythons_is_ours_on_purpose() {
    let ours = ["router-decode-overlap-score-weight"];
    for arg in command().get_arguments() {
        let long = arg.get_long().expect("long names only");
        let flag = format!("--{long}");
        let pythons = PYTHON
            .lines()
            .filter_map(|line| line.split('\t').next())
            .any(|spellings| spellings.split(',').any(|spelling| spelling == flag));
        assert!(pythons || ours.contains(&long), "{flag}");
    }
}

#[test]
fn the_last_of_a_switch_wins() {
    let events = |args: &[&str]| read(args).map(|options| options.kv_switches.router_kv_events());
    assert_eq!(events(&[]), Ok(true));
    assert_eq!(events(&["--no-router-kv-events"]), Ok(false));
    assert_eq!(events(&["--no-kv-events"]), Ok(false));
    assert_eq!(
        events(&["--no-router-kv-events", "--router-kv-events"]),
        Ok(true)
    );
    assert_eq!(
        events(&["--router-kv-events", "--kv-events", "--no-router-kv-events"]),
        Ok(false)
    );
}

#[test]
fn the_last_of_an_option_wins() {
    let options = read(&["--http-port", "1", "--http-port=2"]).expect("read");
    assert_eq!(options.http.http_port, 2);
}

#[test]
fn bad_numbers_are_refused_with_name_and_value() {
    let not_negative = [
        "--router-decode-overlap-score-weight",
        "--router-temperature",
        "--router-kv-overlap-score-credit",
        "--router-prefill-load-scale",
        "--router-ttl-secs",
        "--router-host-cache-hit-weight",
        "--router-queue-threshold",
        "--active-decode-blocks-threshold",
        "--active-prefill-tokens-threshold",
        "--http-port",
        "--kv-cache-block-size",
        "--migration-limit",
        "--router-event-threads",
    ];
    for flag in not_negative {
        for value in ["-1", "NaN", "inf", "-inf", "1,5", "many", "--", " "] {
            let line = refusal(&[flag, value]);
            assert!(line.starts_with(flag), "{flag} {value:?}: {line}");
            assert!(line.contains(value), "{flag} {value:?}: {line}");
            assert_eq!(line.lines().count(), 1, "{line}");
        }
    }
}

#[test]
fn an_empty_number_is_refused_unless_dynamo_reads_it_as_none() {
    let line = refusal(&["--router-decode-overlap-score-weight="]);
    assert_eq!(
        line,
        "--router-decode-overlap-score-weight must be a finite number, 0 or more, got \"\""
    );
    let options = read(&[
        "--router-queue-threshold=",
        "--active-decode-blocks-threshold=None",
    ]);
    let options = options.expect("read");
    assert_eq!(options.kv.router_queue_threshold, Some(Nullable(None)));
    assert_eq!(
        options.router.active_decode_blocks_threshold,
        Some(Nullable(None))
    );
}

#[test]
fn the_decode_overlap_weight_is_read_and_not_set_by_default() {
    let weight =
        |args: &[&str]| read(args).map(|options| options.kv.router_decode_overlap_score_weight);
    assert_eq!(weight(&[]), Ok(None));
    assert_eq!(
        weight(&["--router-decode-overlap-score-weight", "0"]),
        Ok(Some(0.0))
    );
    assert_eq!(
        weight(&["--router-decode-overlap-score-weight=1.5"]),
        Ok(Some(1.5))
    );
}

#[test]
fn a_word_that_is_no_choice_is_refused_with_the_choices() {
    assert_eq!(
        refusal(&["--event-plane", "kafka"]),
        "--event-plane must be one of nats, zmq, got \"kafka\""
    );
    assert!(refusal(&["--router-mode", "best"]).contains("round-robin, random, power-of-two, kv"));
}

#[test]
fn a_refusal_names_the_option_as_it_was_spelled() {
    let line = refusal(&["--kv-overlap-score-weight", "x"]);
    assert!(line.starts_with("--kv-overlap-score-weight "), "{line}");
}

#[test]
fn options_that_are_not_here_are_refused() {
    for option in [
        "--interactive",
        "--no-interactive",
        "-i",
        "--dyn-chat-processor=vllm",
    ] {
        let line = refusal(&[option]);
        assert!(
            line.contains("of Dynamo's Python frontend"),
            "{option}: {line}"
        );
        assert_eq!(line.lines().count(), 1, "{line}");
    }
    assert_eq!(
        refusal(&["--http-prt", "1"]),
        "--http-prt is not an option of this program; did you mean --http-port?"
    );
    assert!(refusal(&["stray"]).contains("stray is not an option"));
    assert_eq!(refusal(&["--http-port"]).lines().count(), 1);
    assert_eq!(refusal(&["--router-kv-events=false"]).lines().count(), 1);
}

#[test]
fn help_shows_groups_examples_and_variables() {
    let text = read(&["--help"]).map(|_| ()).expect_err("shown");
    for part in [
        "KV router:",
        "TLS:",
        "Examples:",
        "DYN_ROUTER_MODE",
        "--no-...",
    ] {
        assert!(text.contains(part), "{part}");
    }
}
