// SPDX-License-Identifier: Apache-2.0

//! `kvdelta replay` from outside.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn replay(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvdelta"));
    command.arg("replay").args(arguments).output().unwrap()
}

fn words(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What is printed where all goes well.
fn stdout(arguments: &[&str]) -> String {
    let output = replay(arguments);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(&[arguments, &["--json"]].concat())).unwrap()
}

/// What is said where options or trace cannot be used.
fn refused(arguments: &[&str]) -> String {
    let output = replay(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    assert!(output.stdout.is_empty());
    words(&output.stderr)
}

fn trace(folder: &Path, lines: &[&str]) -> String {
    let path = folder.join("trace.jsonl");
    fs::write(&path, lines.join("\n")).unwrap();
    path.to_str().unwrap().to_owned()
}

const LINES: [&str; 3] = [
    r#"{"timestamp": 0, "input_length": 1600, "output_length": 20, "hash_ids": [1, 2, 3, 4]}"#,
    r#"{"timestamp": 9000, "input_length": 1600, "output_length": 20, "hash_ids": [1, 2, 3, 5]}"#,
    r#"{"timestamp": 18000, "input_length": 600, "output_length": 1, "hash_ids": [1, 6]}"#,
];

#[test]
fn a_trace_is_compared_over_policies_weights_and_fleets() {
    let folder = tempfile::tempdir().unwrap();
    let path = trace(folder.path(), &LINES);
    let report = json(&[
        "--trace",
        &path,
        "--policy",
        "load,overlap,pooled",
        "--weight",
        "0,2",
        "--decode",
        "1,3",
    ]);
    assert_eq!(report["version"], 1);
    assert_eq!(report["trace"]["requests"], 3);
    assert_eq!(report["trace"]["prompt_tokens"], 3800);
    assert_eq!(report["trace"]["seconds"], 18.0);
    let rows = report["rows"].as_array().unwrap();
    let names: Vec<(&str, Option<f64>, u64)> = rows
        .iter()
        .map(|row| {
            let decode = row["decode"].as_u64().unwrap();
            (
                row["policy"].as_str().unwrap(),
                row["weight"].as_f64(),
                decode,
            )
        })
        .collect();
    let each = |decode| {
        let weights = [Some(0.0), Some(2.0)].map(|weight| ("overlap", weight, decode));
        [
            ("load", None, decode),
            weights[0],
            weights[1],
            ("pooled", None, decode),
        ]
    };
    assert_eq!(names, [each(1), each(3)].concat());
    for row in rows {
        let number = |key: &str| row[key].as_u64().unwrap();
        assert_eq!(number("full_bytes"), 10 * 512 * 163_840);
        let is_warm = row["decode"] == 1 || row["weight"] == 2.0 || row["policy"] == "pooled";
        if is_warm {
            assert_eq!(number("saved_bytes"), 4 * 512 * 163_840, "{row}");
            assert_eq!(row["hit_share"], 4.0 * 512.0 / 3800.0);
        }
        assert_eq!(row["imbalance"].is_null(), row["policy"] == "pooled");
    }
}

#[test]
fn the_table_says_the_same_as_the_json() {
    let arguments = [
        "--synthetic",
        "400",
        "--policy",
        "load,overlap,below-peak,pair,longest-below",
    ];
    let text = stdout(&arguments);
    let report = json(&arguments);
    for row in report["rows"].as_array().unwrap() {
        let saved = row["saved_share"].as_f64().unwrap() * 100.0;
        let imbalance = row["imbalance"].as_f64().unwrap();
        let policy = row["policy"].as_str().unwrap();
        let of_row = |line: &&str| {
            line.starts_with(policy)
                && line.contains(&format!("{saved:.1}%"))
                && line.contains(&format!("{imbalance:.2}"))
        };
        assert!(text.lines().any(|line| of_row(&line)), "{row} in\n{text}");
    }
    assert!(
        text.contains("\nlink    100 Gbit/s a decode worker;"),
        "{text}"
    );
    assert!(
        text.contains("1,280 blocks of 83.9 MB each, step 10 ms"),
        "{text}"
    );
    assert_eq!(text, stdout(&arguments), "the same each time");
    assert_ne!(text, stdout(&[&arguments[..], &["--seed", "1"]].concat()));
}

#[test]
fn one_is_singular_and_thousands_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = trace(folder.path(), &LINES[..1]);
    let fleet = ["--decode", "1", "--prefill", "1", "--prefill-capacity", "4"];
    let said = stdout(&[&["--trace", &path][..], &fleet].concat());
    for line in [
        "trace   1 request in 0 s, mean prompt 1,600 tokens, blocks of 512 tokens",
        "prefill 1 worker, 10,000 tokens/s each, prefix cache of 4 blocks",
        "decode  1 worker, 1,280 blocks of",
    ] {
        assert!(said.contains(line), "{said}");
    }
}

#[test]
fn remarks_say_what_came_of_stale_claims() {
    let arguments = [
        "--synthetic",
        "3000",
        "--per-second",
        "40",
        "--capacity",
        "300",
        "--event-delay",
        "5000",
        "--policy",
        "overlap",
        "--weight",
        "1",
    ];
    let row = &json(&arguments)["rows"][0];
    let asked = row["asked_again"].as_u64().unwrap();
    assert!(
        asked > 0 && row["recomputed"] == 0 && row["waited"] == 0,
        "{row}"
    );
    let expected = format!(
        "overlap 1 on 16: of 3,000 requests, {asked} asked prefill again after a stale claim"
    );
    let text = stdout(&arguments);
    assert!(text.contains(&expected), "{text}");
}

#[test]
fn timing_names_policies_as_the_remarks_do() {
    let output = replay(&["--synthetic", "40", "--weight", "2", "--timing"]);
    let said = String::from_utf8(output.stderr).unwrap();
    let names: Vec<&str> = said
        .lines()
        .map(|line| line.split(':').next().unwrap())
        .collect();
    assert_eq!(names, ["load on 16", "overlap 2 on 16", "pooled on 16"]);
}

#[test]
fn the_link_is_in_gbit_a_second() {
    let folder = tempfile::tempdir().unwrap();
    let path = trace(folder.path(), &LINES[..1]);
    let fleet = ["--prefill-rate", "inf", "--block-bytes", "125000000"];
    let of = |link: &[&str]| {
        let all = [&["--trace", &path, "--policy", "load"][..], &fleet, link].concat();
        let report = json(&all);
        let rate = report["settings"]["link_gbit_per_second"].as_f64();
        (rate, report["rows"][0]["ttft_ms"]["p50"].as_f64().unwrap())
    };
    let (rate, at_once) = of(&["--link", "inf"]);
    assert_eq!(rate, None, "JSON has no infinity");
    for (link, gbit, ms) in [
        (&["--link", "1"][..], 1.0, 4000.0),
        (&["--link", "4"], 4.0, 1000.0),
        (&[], 100.0, 40.0),
    ] {
        let (rate, ttft) = of(link);
        assert_eq!(rate, Some(gbit));
        assert!((ttft - at_once - ms).abs() < 1e-6, "{link:?}: {ttft}");
    }
}

#[test]
fn the_help_says_what_the_defaults_are_of() {
    let help = words(stdout(&["--help"]).as_bytes());
    let bytes = "70B class with GQA (80 layers, 8 KV heads of 128) in FP8; in bf16 it is 327680. \
                 `kvdelta estimate` prints";
    assert!(help.contains(bytes), "{help}");
    assert!(help.contains("[default: 163840]"), "{help}");
    assert!(help.contains("in Gbit/s; inf: transfers take no time [default: 100]"));
}

#[test]
fn charts_are_over_weights_or_over_fleets() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chart.svg");
    let file = path.to_str().unwrap();
    for (decode, title, absent) in [
        ("4", "weight", "decode workers"),
        ("2,4", "decode workers", "weight"),
    ] {
        stdout(&[
            "--synthetic",
            "200",
            "--decode",
            decode,
            "--weight",
            "1,3",
            "--svg",
            file,
        ]);
        let svg = fs::read_to_string(&path).unwrap();
        assert!(
            svg.starts_with("<svg") && svg.contains("imbalance"),
            "{svg}"
        );
        let lines: Vec<&str> = svg.lines().map(str::trim).collect();
        assert!(lines.contains(&title), "{decode}: {title}");
        assert!(!lines.contains(&absent), "{decode}: {absent}");
    }
}

#[test]
fn a_choice_that_is_followed_is_judged() {
    let folder = tempfile::tempdir().unwrap();
    let path = trace(folder.path(), &LINES);
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (others, judged) = (file("others.jsonl"), file("judged.jsonl"));
    let lines = [
        "{\"decode\":2,\"at_ms\":0.5}",
        "{\"decode\":0}",
        "{\"decode\":2}",
    ];
    fs::write(&others, lines.join("\n")).unwrap();
    let fleet = ["--trace", &path, "--decode", "3", "--policy", "overlap"];
    let one = [&fleet[..], &["--weight", "2", "--follow", &others]].concat();
    let report = json(&[&one[..], &["--choices", &judged]].concat());
    // The second one goes where nothing is of it, the third to one of two that have its first block.
    assert_eq!(
        fs::read_to_string(&judged).unwrap(),
        r#"{"decode":2,"cached":0,"held":0,"cheapest":3,"is_cheapest":true}
{"decode":0,"cached":0,"held":0,"cheapest":1,"is_cheapest":false}
{"decode":2,"cached":1,"held":1,"cheapest":2,"is_cheapest":true}
"#
    );
    let saved = report["rows"][0]["saved_bytes"].as_u64();
    assert_eq!(saved, Some(512 * 163_840));

    for (arguments, expected) in [
        (&["--policy", "overlap"][..], "are of one policy, weight"),
        (
            &["--policy", "pair", "--weight", "1"],
            "policy pair has no cost of each worker alone",
        ),
        (
            &["--policy", "load", "--decode", "2"],
            "line 1: there is no decode worker 2, they are 0 to 1",
        ),
    ] {
        let all = [&["--trace", &path, "--follow", &others], arguments].concat();
        let said = refused(&all);
        assert!(said.contains(expected), "{said}");
    }
    fs::write(&others, lines[0]).unwrap();
    let said = refused(&one);
    assert!(said.contains("has 1 lines, the trace 3 requests"), "{said}");
}

#[test]
fn bad_lines_stop_or_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = trace(folder.path(), &[LINES[0], "{\"timestamp\": 1}", LINES[1]]);
    let said = refused(&["--trace", &path]);
    assert!(
        said.contains("line 2: not a request of the Mooncake format: missing field"),
        "{said}"
    );
    let output = replay(&["--trace", &path, "--skip-bad", "--json"]);
    assert_eq!(output.status.code(), Some(0));
    let said = words(&output.stderr);
    assert!(
        said.contains("warning: left out 1 of 3 requests, the first: "),
        "{said}"
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["trace"]["lines_skipped"], 1);
    assert_eq!(report["trace"]["requests"], 2);
}

#[test]
fn what_cannot_be_used_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = trace(folder.path(), &LINES);
    let cases: &[(&[&str], &str)] = &[
        (&[], "<--trace <FILE>|--synthetic <REQUESTS>>"),
        (
            &["--trace", &path, "--synthetic", "9"],
            "'--trace <FILE>' cannot be used with '--synthetic <REQUESTS>'",
        ),
        (
            &["--trace", &path, "--per-second", "9"],
            "'--trace <FILE>' cannot be used with '--per-second <REQUESTS>'",
        ),
        (
            &["--synthetic", "9", "--skip-bad"],
            "'--synthetic <REQUESTS>' cannot be used with '--skip-bad'",
        ),
        (
            &["--trace", "/no/such/file"],
            "cannot read /no/such/file: No such file",
        ),
        (
            &["--trace", &path, "--decode", "0"],
            "'0' for '--decode <WORKERS>': must be a whole number from 1",
        ),
        (&["--trace", &path, "--prefill", "0"], "--prefill"),
        (
            &["--trace", &path, "--weight", "-1"],
            "'-1' for '--weight <WEIGHTS>': -1 is no weight",
        ),
        (
            &["--trace", &path, "--itl", "-1"],
            "'-1' for '--itl <MS>': must be a finite number above 0",
        ),
        (
            &["--trace", &path, "--event-delay", "-3"],
            "'-3' for '--event-delay <MS>': must be a finite number, 0 or more",
        ),
        (
            &["--trace", &path, "--link", "-0.5"],
            "'-0.5' for '--link <GBITS>': must be a number from 0.001",
        ),
        (
            &["--trace", &path, "--seed", "-7"],
            "'-7' for '--seed <SEED>'",
        ),
        (&["--trace", &path, "--weight", "nan"], "NaN is no weight"),
        (
            &["--trace", &path, "--policy", "best"],
            "possible values: load, overlap, below-peak, pair",
        ),
        (
            &["--trace", &path, "--event-loss", "1.5"],
            "must be a number from 0 to 1",
        ),
        (
            &["--trace", &path, "--itl", "0"],
            "must be a finite number above 0",
        ),
        (&["--trace", &path, "--block-size", "0"], "--block-size"),
        (
            &["--trace", &path, "--block-size", "256"],
            "line 1: a prompt of 1600 tokens is 7 blocks of 256 tokens, but the line has 4 hashes",
        ),
        (
            &["--trace", &path, "--capacity", "3"],
            "a decode worker of 3 blocks has no room for the 4 blocks of request 1",
        ),
        (
            &["--trace", &path, "--policy", "pair", "--link", "inf"],
            "policy pair takes finite rates",
        ),
        (
            &["--trace", &path, "--svg", "/no/such/folder/a.svg"],
            "cannot write /no/such/folder/a.svg",
        ),
        (
            &["--trace", &path, "--format", "dynamo"],
            "line 1: not a request of the Dynamo format: missing field `schema` in the line, which has no `event`",
        ),
    ];
    for (arguments, expected) in cases {
        let said = refused(arguments);
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
}
