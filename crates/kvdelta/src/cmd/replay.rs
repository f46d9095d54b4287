// SPDX-License-Identifier: Apache-2.0

//! `kvdelta replay`: a trace through a simulated fleet, routed by kvdelta's own index and cost.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args, ValueEnum};
use kvdelta_indexer::BlockSize;
use kvdelta_overlap::Weight;

use crate::render::{print, say};
use crate::replay::{chart, choices, report::Report, table};
use crate::sim::{Policy, Settings, run as simulate};
use crate::trace::{Format, Reading, Synthetic, Trace, read};
use crate::unit::decimal;

/// Tokens of a block of a made trace, as of Mooncake's.
const BLOCK_TOKENS: u32 = 512;
/// The greatest number of requests or blocks.
const COUNT_MAX: usize = 100_000_000;
/// The greatest number of workers.
const WORKERS_MAX: usize = 100_000;

/// Options of `kvdelta replay`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("requests").args(["traces", "synthetic"]).required(true))]
#[command(after_help = "Examples:
  kvdelta replay --trace conversation_trace.jsonl
  kvdelta replay --trace conversation_trace.jsonl --policy load,overlap,pair --weight 0,0.5,1,2 --json
  kvdelta replay --trace conversation_trace.jsonl --decode 4,8,16,32 --svg workers.svg
  kvdelta replay --trace requests.jsonl.gz --format dynamo --skip-bad
  kvdelta replay --synthetic 100000 --per-second 20 --decode 64 --event-delay 50 --event-loss 0.01

A trace is FAST25-release/traces/conversation_trace.jsonl of the repository kvcache-ai/Mooncake, or what
Dynamo writes with DYN_REQUEST_TRACE_SINKS=file.

Exit codes: 0 done, 2 an option or a trace that cannot be used, or a result that cannot be written.")]
pub(crate) struct Options {
    /// The trace, JSON lines, packed by gzip or not; may be given several times, for the parts of one.
    #[arg(long = "trace", value_name = "FILE")]
    traces: Vec<PathBuf>,

    /// How the trace is written. Not given: as its first line looks.
    #[arg(long, value_enum, conflicts_with = "synthetic")]
    format: Option<Format>,

    /// Leave bad lines out, and say how many.
    #[arg(long, conflicts_with = "synthetic")]
    skip_bad: bool,

    /// Instead of a trace: so many made requests, of conversations with shared system prompts.
    #[arg(long, value_name = "REQUESTS", value_parser = count)]
    synthetic: Option<usize>,

    /// Made requests that come in a second.
    #[arg(long, value_name = "REQUESTS", default_value = "4", conflicts_with = "traces", value_parser = positive)]
    per_second: f64,

    /// Tokens in a block. Not given: what Dynamo's trace says, or 512.
    #[arg(long, value_name = "TOKENS", value_parser = block_size)]
    block_size: Option<BlockSize>,

    /// How many times as fast as recorded the requests come.
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = positive)]
    speedup: f64,

    /// Policies to compare.
    #[arg(
        long = "policy",
        value_enum,
        value_delimiter = ',',
        default_value = "load,overlap,pooled"
    )]
    policies: Vec<Name>,

    /// Weights of overlap and below-peak (blocks of load that a block of overlap is worth) and of pair
    /// (milliseconds that a block of load costs).
    #[arg(long = "weight", value_name = "WEIGHTS", value_delimiter = ',', default_value = "1,2,4", value_parser = weight)]
    weights: Vec<Weight>,

    /// Prefill workers.
    #[arg(long, value_name = "WORKERS", default_value = "16", value_parser = workers)]
    prefill: usize,

    /// Prompt tokens that a prefill worker computes in a second; inf: prefill takes no time.
    #[arg(long, value_name = "TOKENS", default_value = "10000", value_parser = rate)]
    prefill_rate: f64,

    /// Blocks of a prefill worker's prefix cache; 0: it computes every prompt whole.
    #[arg(long, value_name = "BLOCKS", default_value = "0", value_parser = count_or_none)]
    prefill_capacity: usize,

    /// Decode workers; several numbers are compared.
    #[arg(long, value_name = "WORKERS", value_delimiter = ',', default_value = "16", value_parser = workers)]
    decode: Vec<usize>,

    /// Blocks of a decode worker's KV cache.
    #[arg(long, value_name = "BLOCKS", default_value = "1280", value_parser = count)]
    capacity: usize,

    /// A decode step without load: milliseconds.
    #[arg(long, value_name = "MS", default_value = "10", value_parser = positive)]
    itl: f64,

    /// What a step takes more for each prompt token of the requests that run: microseconds.
    #[arg(long, value_name = "US", default_value = "0.05", value_parser = not_negative)]
    itl_per_token: f64,

    /// Prompt tokens that a decode worker computes in a second, after a stale claim.
    #[arg(long, value_name = "TOKENS", default_value = "5000", value_parser = rate)]
    recompute_rate: f64,

    /// What a decode worker's link brings, in Gbit/s; inf: transfers take no time.
    #[arg(long, value_name = "GBITS", default_value = "100", value_parser = rate)]
    link: f64,

    /// Bytes of KV a token. The default is that of a model of the 70B class with GQA (80 layers, 8 KV heads of 128)
    /// in FP8; in bf16 it is 327680. `kvdelta estimate` prints that of a model.
    #[arg(long, value_name = "BYTES", default_value = "163840", value_parser = bytes)]
    token_bytes: u64,

    /// Bytes of KV a block, instead of --token-bytes.
    #[arg(long, value_name = "BYTES", conflicts_with = "token_bytes", value_parser = bytes)]
    block_bytes: Option<u64>,

    /// How late the router hears of what a decode worker stored and removed: milliseconds.
    #[arg(long, value_name = "MS", default_value = "0", value_parser = not_negative)]
    event_delay: f64,

    /// Share of these events of which it never hears.
    #[arg(long, value_name = "SHARE", default_value = "0", value_parser = share)]
    event_loss: f64,

    /// Of made requests, draws among equal costs, and lost events.
    #[arg(long, default_value = "0")]
    seed: u64,

    /// Print JSON.
    #[arg(long)]
    json: bool,

    /// Write a chart of what is saved and of the imbalance, over the number of decode workers if there are
    /// several, else over the weight.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Write where each request went, a JSON line for each; of one policy, weight and number of decode workers.
    #[arg(long, value_name = "FILE")]
    choices: Option<PathBuf>,

    /// Send each request to the decode worker (from 0) that this file's line of its number names, as --choices writes
    /// them; --choices then says where the policy, load or overlap, might have chosen so.
    #[arg(long, value_name = "FILE")]
    follow: Option<PathBuf>,

    /// Say on standard error how many requests a second were simulated.
    #[arg(long)]
    timing: bool,
}

/// Policies by their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    /// Load alone, after prefill: what Dynamo 1.6.1 does.
    Load,
    /// Load and cached prefix; weight 0 is load.
    Overlap,
    /// As overlap, by a cost in which load counts the more, the nearer a worker is to the busiest.
    BelowPeak,
    /// The pair of a prefill and a decode worker, by time.
    Pair,
    /// Reference: the longest cached prefix, whatever the load.
    Longest,
    /// Reference: the longest one among the workers with at most 1.5 times the mean load.
    LongestBelow,
    /// Reference: one cache as large as all of them, about what an ideal choice would save.
    Pooled,
}

impl Name {
    fn with(self, weights: &[Weight]) -> Vec<Policy> {
        let each = |policy: fn(Weight) -> Policy| weights.iter().copied().map(policy).collect();
        match self {
            Self::Load => vec![Policy::Load],
            Self::Overlap => each(Policy::Overlap),
            Self::BelowPeak => each(Policy::BelowPeak),
            Self::Pair => each(Policy::Pair),
            Self::Longest => vec![Policy::Longest],
            Self::LongestBelow => vec![Policy::LongestBelow],
            Self::Pooled => vec![Policy::Pooled],
        }
    }
}

fn whole(text: &str, least: usize, most: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(value) if (least..=most).contains(&value) => Ok(value),
        _ => Err(format!("must be a whole number from {least} to {most}")),
    }
}

fn count(text: &str) -> Result<usize, String> {
    whole(text, 1, COUNT_MAX)
}

fn workers(text: &str) -> Result<usize, String> {
    whole(text, 1, WORKERS_MAX)
}

fn count_or_none(text: &str) -> Result<usize, String> {
    whole(text, 0, COUNT_MAX)
}

fn bytes(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(value @ 1..=1_000_000_000_000) => Ok(value),
        _ => Err("must be a whole number from 1 to 10^12".to_owned()),
    }
}

fn block_size(text: &str) -> Result<BlockSize, String> {
    let tokens: u32 = text
        .parse()
        .map_err(|_| "not a number of tokens".to_owned())?;
    BlockSize::try_from(tokens).map_err(|error| error.to_string())
}

fn weight(text: &str) -> Result<Weight, String> {
    let weight: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    Weight::try_from(weight).map_err(|error| error.to_string())
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("must be a finite number above 0".to_owned()),
    }
}

fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("must be a finite number, 0 or more".to_owned()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value >= 1e-3 => Ok(value),
        _ => Err("must be a number from 0.001, or inf".to_owned()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("must be a number from 0 to 1".to_owned()),
    }
}

/// Runs the command.
pub(crate) fn run(options: &Options) -> ExitCode {
    match replay(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("error: {error:#}"));
            ExitCode::from(2)
        }
    }
}

fn replay(options: &Options) -> Result<()> {
    let (mut trace, skipped) = requests(options)?;
    trace.speed_up(options.speedup);
    let policies: Vec<Policy> = options
        .policies
        .iter()
        .flat_map(|name| name.with(&options.weights))
        .collect();
    let Some(first) = options.decode.first() else {
        bail!("give --decode, the number of decode workers");
    };
    let settings = settings(options, *first, trace.block_size());
    let is_one = policies.len() == 1 && options.decode.len() == 1;
    if !is_one && (options.choices.is_some() || options.follow.is_some()) {
        bail!("--choices and --follow are of one policy, weight and number of decode workers");
    }
    let follow = match &options.follow {
        Some(path) => Some(choices::read(path, trace.requests().len(), *first)?),
        None => None,
    };
    let mut report = Report::new(&trace, skipped, settings);
    for decode in &options.decode {
        for policy in &policies {
            let fleet = Settings {
                decode: *decode,
                ..settings
            };
            let start = Instant::now();
            let outcome = simulate(&trace, &fleet, *policy, follow.as_deref())?;
            if options.timing {
                let seconds = start.elapsed().as_secs_f64();
                say(&format!(
                    "{} on {decode}: {} requests a second, {seconds:.3} s",
                    policy.label(),
                    decimal(outcome.requests as f64 / seconds, 0)
                ));
            }
            if let Some(path) = &options.choices {
                choices::write(path, &outcome.chosen)?;
            }
            report.add(*policy, *decode, outcome);
        }
    }
    if let Some(path) = &options.svg {
        let svg = chart::svg(&report)?;
        fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let text = if options.json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        table::text(&report)
    };
    print(&text).context("cannot write the result to standard output")
}

/// The trace, and how many of its lines were left out.
fn requests(options: &Options) -> Result<(Trace, u64)> {
    if let Some(requests) = options.synthetic {
        let block_size = match options.block_size {
            Some(size) => size,
            None => BlockSize::try_from(BLOCK_TOKENS)?,
        };
        let trace = Synthetic {
            requests,
            per_second: options.per_second,
            block_size,
            seed: options.seed,
        };
        return Ok((trace.trace(), 0));
    }
    let how = Reading {
        format: options.format,
        block_size: options.block_size,
        skip_bad: options.skip_bad,
    };
    let read = read(&options.traces, how)?;
    if let Some(first) = read.first_skipped {
        let first = anyhow::Error::new(first);
        say(&format!(
            "warning: left out {} of {} requests, the first: {first:#}",
            read.skipped, read.lines
        ));
    }
    Ok((read.trace, read.skipped))
}

fn settings(options: &Options, decode: usize, block_size: BlockSize) -> Settings {
    let tokens = u64::from(u32::from(block_size));
    Settings {
        seed: options.seed,
        prefill: options.prefill,
        prefill_tokens_per_s: options.prefill_rate,
        prefill_capacity: options.prefill_capacity,
        decode,
        capacity: options.capacity,
        itl_ms: options.itl,
        itl_ms_per_block: options.itl_per_token * f64::from(u32::from(block_size)) / 1000.0,
        recompute_tokens_per_s: options.recompute_rate,
        link_gbit_per_second: options.link,
        block_bytes: options
            .block_bytes
            .unwrap_or_else(|| options.token_bytes.saturating_mul(tokens)),
        event_delay_ms: options.event_delay,
        event_loss: options.event_loss,
    }
}
