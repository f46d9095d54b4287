// SPDX-License-Identifier: Apache-2.0

//! A trace through Dynamo's offline replay, once for every weight: what a decode fleet saves.
//!
//! Router, queue, index, engines and transfers are Dynamo's own simulation (`dynamo-mocker`, with
//! the patched router). This program only sets it up and sums its records.

#![allow(missing_docs, reason = "a program")]

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use dynamo_kv_router::KvRouterConfig;
use dynamo_mocker::common::protocols::MockerConfig;
use dynamo_mocker::loadgen::TraceFileFormat;
use dynamo_mocker::replay::{
    OfflineDisaggReplayConfig, PerRequestRecord, ReplayRouterMode, TraceSimulationReport,
    simulate_trace_file_disagg_with_router_mode_and_format,
};
use serde::Serialize;

/// Requests of a trace through a simulated prefill and decode fleet, once for every weight.
///
/// One such trace is FAST25-release/traces/conversation_trace.jsonl of the repository
/// kvcache-ai/Mooncake.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench replay")]
#[command(after_help = "Examples:
  cargo xtask bench replay --trace conversation_trace.jsonl
  cargo xtask bench replay --trace conversation_trace.jsonl --speedup 4 --weights 0,2 --json

Exit codes: 0 done, 1 failed, 2 an option that cannot be used.")]
struct Options {
    /// Trace in the Mooncake format, one request a line; `.gz` is unpacked.
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Weights to compare.
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,4,8", value_parser = weight)]
    weights: Vec<f64>,
    /// Prefill workers.
    #[arg(long, value_name = "WORKERS", default_value_t = 32, value_parser = count)]
    prefill: usize,
    /// Decode workers.
    #[arg(long, value_name = "WORKERS", default_value_t = 16, value_parser = count)]
    decode: usize,
    /// Tokens a block; the trace's blocks have as many.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = count)]
    block_size: usize,
    /// KV blocks of each worker.
    #[arg(long, value_name = "BLOCKS", default_value_t = 1_280, value_parser = count)]
    capacity: usize,
    /// How many times as fast as recorded the requests arrive.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = positive)]
    speedup: f64,
    /// Bytes of KV a token.
    #[arg(long, value_name = "BYTES", default_value_t = 163_840, value_parser = count)]
    token_bytes: usize,
    /// Link of a decode worker, in 10^9 bytes a second.
    #[arg(long, value_name = "GB_PER_S", default_value_t = 12.5, value_parser = positive)]
    link: f64,
    /// Write where each request went, a JSON line for each in the order of the trace, as `kvdelta replay --follow`
    /// takes them; of one weight. No two requests may come at the same time.
    #[arg(long, value_name = "FILE")]
    choices: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// In place of weight 0. Added to a whole number of blocks it changes no cost, and so no choice; but the router then
/// counts what each worker has.
const COUNTED: f64 = f64::MIN_POSITIVE;

/// The greatest number of workers, blocks, tokens or bytes.
const COUNT_MAX: usize = 1_000_000_000;

/// Where a request went.
#[derive(Debug, Serialize)]
struct Choice {
    /// The decode worker.
    decode: usize,
    /// Blocks of the prompt that the router counted on it.
    cached: usize,
    /// When it was chosen, and when all was done: milliseconds.
    chosen_ms: f64,
    ended_ms: f64,
}

/// What one weight did.
#[derive(Debug, Serialize)]
struct Row {
    weight: f64,
    requests: usize,
    /// Bytes if every prompt travelled whole, and of the blocks that did; the last one begun is one.
    full_bytes: f64,
    moved_bytes: f64,
    saved_share: f64,
    /// Mean over the arrivals at decode: blocks of the fullest worker over the mean.
    load_max_over_mean: f64,
    /// Requests of the busiest worker over the mean.
    requests_max_over_mean: f64,
    ttft_median_ms: f64,
    ttft_p99_ms: f64,
    itl_median_ms: f64,
    itl_p99_ms: f64,
}

/// A finite number, 0 or more.
fn weight(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("must be a finite number, 0 or more".to_owned()),
    }
}

/// A finite number above 0.
fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("must be a finite number above 0".to_owned()),
    }
}

/// A whole number from 1 to [`COUNT_MAX`].
fn count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(value @ 1..=COUNT_MAX) => Ok(value),
        _ => Err(format!("must be a whole number from 1 to {COUNT_MAX}")),
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    if let Err(error) = check(&options) {
        error.exit();
    }
    let unpacked = unpacked(&options.trace)?;
    let trace = unpacked
        .as_ref()
        .map_or(options.trace.as_path(), |file| file.path());
    let mut rows = Vec::new();
    for &weight in &options.weights {
        eprintln!("weight {weight}");
        let report = replay(&options, trace, weight)
            .with_context(|| format!("{} at weight {weight}", options.trace.display()))?;
        rows.push(row(&options, weight, &report)?);
        if let Some(path) = &options.choices {
            write_choices(path, &choices(&report, options.block_size)?)
                .with_context(|| format!("--choices: cannot write {}", path.display()))?;
        }
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        table(&rows);
    }
    Ok(())
}

/// Whether the options fit each other.
fn check(options: &Options) -> Result<(), clap::Error> {
    if options.choices.is_some() && options.weights.len() != 1 {
        let why = "--choices takes one of --weights";
        return Err(Options::command().error(ErrorKind::ArgumentConflict, why));
    }
    Ok(())
}

/// The trace as a plain file, if it is packed.
fn unpacked(trace: &Path) -> Result<Option<tempfile::NamedTempFile>> {
    if trace.extension().is_none_or(|extension| extension != "gz") {
        return Ok(None);
    }
    let read = || -> io::Result<tempfile::NamedTempFile> {
        let mut packed: Box<dyn Read> = Box::new(flate2::read::GzDecoder::new(File::open(trace)?));
        let mut plain = tempfile::NamedTempFile::new()?;
        io::copy(&mut packed, &mut plain)?;
        Ok(plain)
    };
    read()
        .map(Some)
        .with_context(|| format!("cannot unpack {}", trace.display()))
}

fn replay(options: &Options, trace: &Path, weight: f64) -> Result<TraceSimulationReport> {
    let workers = |worker_type: &str| {
        MockerConfig::from_value(serde_json::json!({
            "engine": {
                "backend": "vllm",
                "worker_type": worker_type,
                "block_size": options.block_size,
                "num_gpu_blocks": options.capacity,
                "max_num_seqs": 256,
                "max_num_batched_tokens": 8192,
                "kv_transfer_bandwidth": options.link,
                "kv_transfer_bytes_per_token": options.token_bytes,
                // As vLLM's NIXL connector does: a decode worker reads only what it lacks.
                "kv_transfer_timing_mode": "destination_missing",
            }
        }))
    };
    simulate_trace_file_disagg_with_router_mode_and_format(
        OfflineDisaggReplayConfig {
            prefill_args: workers("prefill")?,
            decode_args: workers("decode")?,
            num_prefill_workers: options.prefill,
            num_decode_workers: options.decode,
        },
        Some(KvRouterConfig {
            decode_overlap_score_weight: Some(weight.max(COUNTED)),
            ..Default::default()
        }),
        None,
        trace,
        options.block_size,
        options.speedup,
        ReplayRouterMode::KvRouter,
        TraceFileFormat::Mooncake,
        0.0,
        1,
        true,
        None,
        Default::default(),
    )
}

/// Where each request went. The records are in the order of arrival, and tell no line of the trace.
fn choices(report: &TraceSimulationReport, block_size: usize) -> Result<Vec<Choice>> {
    let records = &report.per_request;
    if let Some(at_ms) = shared_time(records.iter().map(|record| record.arrival_time_ms)) {
        bail!("--choices: two requests come at {at_ms} ms, and nothing tells which is which");
    }
    let choice = |record: &PerRequestRecord| {
        Some(Choice {
            decode: record.decode_worker_idx?,
            cached: record.decode_route_overlap_tokens? / block_size,
            // When prefill is done. The worker takes it between two of its steps.
            chosen_ms: record.source_held_ms?,
            ended_ms: record.terminal_time_ms,
        })
    };
    let all = records.iter().map(|record| {
        choice(record).with_context(|| format!("request {} lacks its route", record.uuid))
    });
    all.collect()
}

/// The first time that the next one does not pass.
fn shared_time(mut times: impl Iterator<Item = f64>) -> Option<f64> {
    let mut last = times.next()?;
    times.find_map(|time| {
        let before = std::mem::replace(&mut last, time);
        (before >= time).then_some(before)
    })
}

fn write_choices(path: &Path, choices: &[Choice]) -> io::Result<()> {
    let mut file = io::BufWriter::new(File::create(path)?);
    for choice in choices {
        serde_json::to_writer(&mut file, choice)?;
        file.write_all(b"\n")?;
    }
    file.flush()
}

fn row(options: &Options, weight: f64, report: &TraceSimulationReport) -> Result<Row> {
    let (mut full_blocks, mut moved_blocks) = (0.0, 0.0);
    let mut requests = vec![0.0_f64; options.decode];
    let mut changes = Vec::new();
    for record in &report.per_request {
        let (Some(worker), Some(reserved_ms), Some(overlap_tokens)) = (
            record.decode_worker_idx,
            record.destination_reserved_ms,
            record.decode_route_overlap_tokens,
        ) else {
            bail!("request {} never reached a decode worker", record.uuid);
        };
        let blocks = record.input_length.div_ceil(options.block_size);
        // What the router counts is what the worker has: its events come at once. The time until it has the rest
        // would say too much, since it waits for the end of a step. The block of the last token always travels.
        let held = overlap_tokens.min(record.input_length.saturating_sub(1)) / options.block_size;
        full_blocks += blocks as f64;
        moved_blocks += (blocks - held) as f64;
        requests[worker] += 1.0;
        changes.push((reserved_ms, worker, blocks as f64));
        changes.push((record.terminal_time_ms, worker, -(blocks as f64)));
    }
    ensure!(!report.per_request.is_empty(), "the trace has no requests");
    // Those that end go first.
    changes.sort_by(|left, right| left.0.total_cmp(&right.0).then(left.2.total_cmp(&right.2)));
    let mut load = vec![0.0_f64; options.decode];
    let mut unevenness = 0.0;
    for (_, worker, blocks) in changes {
        load[worker] += blocks;
        if blocks > 0.0 {
            unevenness += max_over_mean(&load);
        }
    }
    let block_bytes = (options.block_size * options.token_bytes) as f64;
    let itl = &report.latency.itl.distribution;
    Ok(Row {
        weight,
        requests: report.per_request.len(),
        full_bytes: full_blocks * block_bytes,
        moved_bytes: moved_blocks * block_bytes,
        saved_share: 1.0 - moved_blocks / full_blocks,
        load_max_over_mean: unevenness / report.per_request.len() as f64,
        requests_max_over_mean: max_over_mean(&requests),
        ttft_median_ms: report.latency.ttft.median_ms,
        ttft_p99_ms: report.latency.ttft.p99_ms,
        itl_median_ms: itl.median_ms,
        itl_p99_ms: itl.p99_ms,
    })
}

fn max_over_mean(values: &[f64]) -> f64 {
    let max = values.iter().copied().fold(0.0, f64::max);
    max * values.len() as f64 / values.iter().sum::<f64>()
}

fn table(rows: &[Row]) {
    println!(
        "{:>6} {:>9} {:>10} {:>7} {:>10} {:>14} {:>14}",
        "weight", "full GB", "moved GB", "saved", "imbalance", "TTFT p50/p99", "ITL p50/p99"
    );
    for row in rows {
        println!(
            "{:>6} {:>9.0} {:>10.0} {:>6.1}% {:>10.2} {:>8.0}/{:<5.0} {:>8.2}/{:<5.2}",
            row.weight,
            row.full_bytes / 1e9,
            row.moved_bytes / 1e9,
            row.saved_share * 100.0,
            row.load_max_over_mean,
            row.ttft_median_ms,
            row.ttft_p99_ms,
            row.itl_median_ms,
            row.itl_p99_ms
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uneven_load_is_the_fullest_worker_over_the_mean() {
        assert_eq!(max_over_mean(&[3.0, 0.0, 0.0]), 3.0);
        assert_eq!(max_over_mean(&[2.0, 2.0]), 1.0);
    }

    #[test]
    fn choices_are_of_one_weight_and_of_requests_that_can_be_told_apart() {
        for (weights, is_good) in [("--weights=2", true), ("--weights=0,2", false)] {
            let arguments = ["replay", "--trace=t", "--choices=c", weights];
            let options = Options::try_parse_from(arguments).unwrap();
            assert_eq!(check(&options).is_ok(), is_good, "{weights}");
        }
        assert_eq!(shared_time([0.0, 1.0, 2.5].into_iter()), None);
        assert_eq!(shared_time([0.0, 1.0, 1.0].into_iter()), Some(1.0));
    }

    #[test]
    fn a_value_that_cannot_be_used_is_refused_with_its_option() {
        for (option, value) in [
            ("--link", "0"),
            ("--link", "inf"),
            ("--speedup", "-1"),
            ("--speedup", "NaN"),
            ("--prefill", "0"),
            ("--decode", "0"),
            ("--block-size", "0"),
            ("--capacity", "0"),
            ("--token-bytes", "18446744073709551615"),
            ("--weights", "1,-2"),
        ] {
            let argument = format!("{option}={value}");
            let error = Options::try_parse_from(["replay", "--trace=t", &argument]).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{argument}");
            let text = error.to_string();
            let named = value.rsplit(',').next().unwrap_or(value);
            assert!(text.contains(option) && text.contains(named), "{text}");
        }
        assert!(Options::try_parse_from(["replay", "--trace=t", "--weights=0,2.5"]).is_ok());
    }
}
