// SPDX-License-Identifier: Apache-2.0

//! `kvdelta estimate` as a command: models by options and by config, bad input, JSON, the RFC.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

fn estimate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvdelta"))
        .arg("estimate")
        .args(arguments)
        .output()
        .unwrap()
}

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

fn text(arguments: &[&str]) -> String {
    let output = estimate(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

fn report(arguments: &[&str]) -> Value {
    serde_json::from_str(&text(&[arguments, &["--json"]].concat())).unwrap()
}

/// The exit code is 2, and standard error says it.
fn refused(arguments: &[&str], saying: &str) {
    let output = estimate(arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    assert!(output.stdout.is_empty());
    // Lines are wrapped.
    let error = words(&error).join(" ");
    assert!(error.contains(saying), "{arguments:?}: {error}");
}

fn fixture(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/estimate");
    fs::read_to_string(folder.join(name)).unwrap()
}

fn config(folder: &TempDir, json: &Value) -> String {
    let path = folder.path().join("config.json");
    fs::write(&path, json.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

fn llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    })
}

const SHAPE: [&str; 6] = ["--layers", "80", "--kv-heads", "8", "--head-dim", "128"];

fn with_shape<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    [&SHAPE, arguments].concat()
}

#[test]
fn the_report_as_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = config(&folder, &llama());
    let arguments = [
        "--config",
        &path,
        "--prompt",
        "131072",
        "--cached",
        "114688",
        "--tp",
        "8",
        "--link",
        "10,25,100,400",
        "--device",
        "h100",
    ];
    assert_eq!(text(&arguments), fixture("llama.txt"));
}

#[test]
fn the_rfc_as_text() {
    assert_eq!(text(&["--rfc"]), fixture("rfc.txt"));
    let rfc: Value = serde_json::from_str(&text(&["--rfc", "--json"])).unwrap();
    assert_eq!(rfc["version"], 1);
    assert_eq!(rfc["transfer"][1]["verdict"], "differs");
    assert_eq!(rfc["gains"][5]["verdict"], "overlaps");
    assert_eq!(rfc["literature"][0]["verdict"], "agrees");
}

#[test]
fn the_docs_show_what_is_printed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let docs = fs::read_to_string(folder.join("savings.md")).unwrap();
    for name in ["llama.txt", "rfc.txt"] {
        assert!(docs.contains(&fixture(name)), "{name}");
    }
}

#[test]
fn the_report_as_json() {
    let request = ["--prompt", "2148", "--cached", "2148", "--block-size", "32"];
    let report = report(&with_shape(
        &[&request[..], &["--compute-rate", "1000"]].concat(),
    ));
    assert_eq!(report["version"], 1);
    assert_eq!(report["model"]["token_bytes"], 327_680);
    assert_eq!(
        report["request"],
        json!({
            "prompt_tokens": 2148, "block_size_tokens": 32, "prompt_blocks": 68,
            "cached_tokens": 2148, "overlap_blocks": 67, "overlap_tokens": 2144,
            "delta_blocks": 1, "missing_tokens": 4,
        })
    );
    assert_eq!(report["transfer"]["full_bytes"], 68 * 32 * 327_680);
    assert_eq!(report["transfer"]["delta_bytes"], 32 * 327_680);
    assert_eq!(
        report["prefill_memory"]["early_release_bytes"],
        32 * 327_680
    );
    assert_eq!(report["recompute"]["seconds"], 0.004);
    assert_eq!(report["links"][0]["faster"], "transfer");
}

#[test]
fn one_block_travels() {
    let text = text(&with_shape(&["--prompt", "1601", "--cached", "1600"]));
    let line = "1,601 tokens, 101 blocks of 16; D holds 1,600 tokens (99.9 %), 1 block travels\n";
    assert!(text.contains(line), "{text}");
}

#[test]
fn without_compute_there_is_no_recompute() {
    let report = report(&with_shape(&["--prompt", "1000"]));
    assert_eq!(report["recompute"], Value::Null);
    assert_eq!(report["links"][0]["faster"], Value::Null);
    let text = text(&with_shape(&["--prompt", "1000"]));
    assert!(!text.contains("recompute"), "{text}");
}

#[test]
fn layouts() {
    let request = ["--prompt", "16", "--cached", "0"];
    let token = |arguments: &[&str]| {
        let report = report(&with_shape(&[&request[..], arguments].concat()));
        let bytes = |part: &str, key: &str| report[part][key].as_u64().unwrap() / 16;
        (
            bytes("transfer", "full_bytes"),
            bytes("transfer", "full_bytes_a_rank"),
            bytes("prefill_memory", "held_bytes"),
            bytes("prefill_memory", "held_bytes_a_rank"),
        )
    };
    let all = 327_680;
    assert_eq!(token(&["--tp", "8"]), (all, all / 8, all, all / 8));
    assert_eq!(token(&["--tp", "16"]), (2 * all, all / 8, 2 * all, all / 8));
    let unlike = token(&["--tp", "2", "--prefill-tp", "16"]);
    assert_eq!(unlike, (all, all / 2, 2 * all, all / 8));
    assert_eq!(token(&["--dp", "8"]), (all, all, all, all));
    assert_eq!(token(&["--dtype", "nvfp4"]).0, 2 * 80 * 8 * 72);
}

#[test]
fn a_latent_is_on_every_rank() {
    let latent = [
        "--layers",
        "61",
        "--kv-lora-rank",
        "512",
        "--qk-rope-head-dim",
        "64",
    ];
    let report = report(&[&latent[..], &["--prompt", "16", "--tp", "8"]].concat());
    assert_eq!(report["model"]["token_bytes"], 70_272);
    assert_eq!(report["transfer"]["full_bytes"], 8 * 16 * 70_272);
    assert_eq!(report["layout"]["decode"]["copies"], 8);
}

#[test]
fn attention_is_counted_where_the_heads_are_known() {
    let device = [
        "--prompt",
        "131072",
        "--device",
        "h100",
        "--params",
        "68451041280",
    ];
    let plain = report(&with_shape(&device));
    assert_eq!(plain["recompute"]["attention_flops"], 0.0);
    assert!(plain["warnings"][0].as_str().unwrap().contains("attention"));
    let heads = report(&with_shape(&[&device[..], &["--heads", "64"]].concat()));
    // 2 x 256 x 64 x 80 a pair.
    let pairs = 131_072_u64 * 131_073 / 2;
    let flops = heads["recompute"]["attention_flops"].as_f64().unwrap();
    assert!((flops / (2_621_440 * pairs) as f64 - 1.0).abs() < 1e-12);
    assert_eq!(heads["warnings"], json!([]));
    assert!(
        heads["recompute"]["source"]
            .as_str()
            .unwrap()
            .contains("H100")
    );
}

#[test]
fn windows_are_told_of() {
    let windows = [
        "--window-layers",
        "40",
        "--window",
        "128",
        "--prompt",
        "1600",
    ];
    let report = report(&with_shape(&windows));
    let block = 16 * 2 * 8 * 128 * 2 * 40;
    assert_eq!(report["transfer"]["full_bytes"], (100 + 9) * block);
    let warning = report["warnings"][0].as_str().unwrap();
    assert!(
        warning.contains("no claims about models with windows"),
        "{warning}"
    );
}

#[test]
fn bad_options_are_named() {
    let prompt = ["--prompt", "1000"];
    for (arguments, saying) in [
        (
            &["--dtype", "int3"][..],
            "unknown dtype `int3`: one of bf16, fp16, fp32, fp8, nvfp4",
        ),
        (
            &["--dtype", "fp8_ds_mla"],
            "fp8_ds_mla is the format of an MLA cache",
        ),
        (
            &["--cached", "1001"],
            "1001 cached tokens are more than the prompt's 1000",
        ),
        (
            &["--tp", "3"],
            "error: --tp 3: 8 KV heads cannot be split over TP 3",
        ),
        (
            &["--prefill-tp", "12"],
            "error: --prefill-tp 12: 8 KV heads cannot be split over TP 12",
        ),
        (&["--cached", "-5"], "'-5' for '--cached <TOKENS>'"),
        (&["--tp", "0"], "0 is not in 1.."),
        (&["--dp", "0"], "0 is not in 1.."),
        (&["--block-size", "0"], "0 is not in 1.."),
        (&["--link", "0"], "'--link <GBITS>': it must be above 0"),
        (&["--link", "-5"], "'--link <GBITS>': it must be above 0"),
        (
            &["--link", "NaN"],
            "'--link <GBITS>': it is no finite number",
        ),
        (
            &["--link", "inf"],
            "'--link <GBITS>': it is no finite number",
        ),
        (&["--link", "100,fast"], "'fast' for '--link <GBITS>'"),
        (&["--link", ""], "'--link <GBITS>'"),
        (
            &["--overhead-ms", "-1"],
            "'--overhead-ms <MS>': it must not be negative",
        ),
        (&["--compute-rate", "0"], "it must be above 0"),
        (
            &["--device", "h1000"],
            "unknown device `h1000`: one of a100, l40s",
        ),
        (
            &["--device", "h100"],
            "the number of parameters is not known",
        ),
        (
            &["--device", "a100", "--params", "7e9", "--precision", "fp8"],
            "a100 has no FP8",
        ),
        (
            &["--device", "h100", "--precision", "fp6"],
            "unknown precision `fp6`: bf16 or fp8",
        ),
        (
            &["--device", "h100", "--utilisation", "1.5"],
            "it must not be above 1",
        ),
        (
            &["--device", "h100", "--utilisation", "NaN"],
            "it is no finite number",
        ),
        (
            &["--device", "h100", "--compute-rate", "5"],
            "cannot be used with",
        ),
        (&["--utilisation", "0.4"], "--device <NAME>"),
        (
            &["--window-layers", "81", "--window", "5"],
            "81 layers with a window are more than the 80",
        ),
        (&["--window-layers", "8"], "--window <TOKENS>"),
        (&["--kv-lora-rank", "512"], "cannot be used with"),
        (&["--rfc"], "cannot be used with"),
        (
            &["--params", "7e9", "--compute-rate", "5"],
            "'--params <N>' cannot be used with '--compute-rate <TOKENS>'",
        ),
        (
            &["--devices", "2", "--compute-rate", "5"],
            "'--devices <N>' cannot be used with '--compute-rate <TOKENS>'",
        ),
        (&["--qk-rope-head-dim", "64"], "cannot be used with"),
    ] {
        refused(&with_shape(&[&prompt[..], arguments].concat()), saying);
    }
    refused(&SHAPE, "<--prompt <TOKENS>|--rfc>");
    refused(&[], "<--prompt <TOKENS>|--rfc>");
    refused(&["--prompt", "-5"], "'-5' for '--prompt <TOKENS>'");
    for (option, value) in [
        ("--prefill-tp", "2"),
        ("--dtype", "fp8"),
        ("--block-size", "32"),
    ] {
        let saying = format!("'--rfc' cannot be used with '{option} <");
        refused(&["--rfc", option, value], &saying);
    }
    for (option, value) in [("--head-dim", "64"), ("--window", "9")] {
        let saying = format!("'--config <FILE>' cannot be used with '{option} <");
        refused(&["--config", "c", "--prompt", "9", option, value], &saying);
    }
    refused(&with_shape(&["--prompt", "0"]), "0 is not in 1..");
    refused(&prompt, "give a model: --config FILE, or --layers");
    let heads = |heads| ["--layers", "80", "--kv-heads", heads, "--head-dim", "128"];
    refused(
        &[&heads("0")[..], &prompt].concat(),
        "'--kv-heads <N>': 0 is not in 1..",
    );
    refused(&["--layers", "80", "--prompt", "9"], "give a model");
    refused(
        &["--layers", "80", "--kv-heads", "8", "--prompt", "9"],
        "--kv-heads takes --head-dim",
    );
    refused(
        &["--layers", "61", "--kv-lora-rank", "512", "--prompt", "9"],
        "--kv-lora-rank takes --qk-rope-head-dim",
    );
}

#[test]
fn bad_configs_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = ["--prompt", "1000"];
    let mut hybrid = llama();
    hybrid["mamba_d_state"] = json!(128);
    let mut without_heads = llama();
    without_heads["num_key_value_heads"] = json!(0);
    for (json, saying) in [
        (hybrid, "`mamba_d_state` tells of layers that keep a state"),
        (without_heads, "`num_key_value_heads` is 0"),
        (json!({}), "config.json: it has no `num_hidden_layers`"),
        (json!([]), "config.json: it is no JSON object"),
    ] {
        let path = config(&folder, &json);
        refused(&[&["--config", &path][..], &prompt].concat(), saying);
    }
    let path = config(&folder, &llama());
    let arguments = [&["--config", &path, "--tp", "24"][..], &prompt].concat();
    refused(
        &arguments,
        "error: --tp 24: 64 attention heads cannot be split over TP 24",
    );
    let tp = ["--config", &path, "--prefill-tp", "3"];
    refused(
        &[&tp[..], &prompt].concat(),
        "error: --prefill-tp 3: 64 attention heads cannot be split over TP 3",
    );
    fs::write(folder.path().join("config.json"), "{").unwrap();
    refused(
        &[&["--config", &path][..], &prompt].concat(),
        "config.json is no JSON",
    );
    let missing = folder.path().join("none.json");
    let missing = missing.to_str().unwrap();
    refused(
        &[&["--config", missing][..], &prompt].concat(),
        "cannot read",
    );
}

#[test]
fn the_help_has_examples_that_work() {
    let help = text(&["--help"]);
    let folder = tempfile::tempdir().unwrap();
    let path = config(&folder, &llama());
    let examples = help.lines().filter_map(|line| {
        let example = line.strip_prefix("  kvdelta estimate ")?;
        Some(example.split("   ").next().unwrap_or_default())
    });
    let mut tried = 0;
    for example in examples {
        let arguments: Vec<_> = words(example)
            .into_iter()
            .map(|word| if word == "config.json" { &path } else { word })
            .collect();
        text(&arguments);
        tried += 1;
    }
    assert_eq!(tried, 5);
}
