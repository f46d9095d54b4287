// SPDX-License-Identifier: Apache-2.0

//! Loads one index and tells what it takes, as one JSON object. A part of `bench-index`.

use std::alloc::System;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use kvdelta_benches::contender::{Contender, stream};
use kvdelta_benches::memory::{Kind, Measured, count};
use kvdelta_benches::oracle::Oracle;
use kvdelta_benches::query::{hashes, wrong};
use kvdelta_benches::trace::Trace;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Loads one index and tells what it takes.
#[derive(Debug, Parser)]
struct Options {
    /// The index.
    contender: Contender,
    /// What it holds.
    kind: Kind,
    /// About how many (worker, block) pairs.
    entries: usize,
    /// The trace's file.
    #[arg(long)]
    trace: Option<PathBuf>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let trace = options.trace.as_deref().map(Trace::read).transpose()?;
    let data = options
        .kind
        .data(options.entries, trace.as_ref())
        .context("this kind needs --trace FILE")?;
    drop(trace);
    let before = live();
    let mut measured = None;
    stream(options.contender, &data, |index| {
        let bytes = live().saturating_sub(before);
        let prompts = data.prompts(64);
        let hashes: Vec<_> = prompts.iter().map(|prompt| hashes(prompt)).collect();
        let oracle = Oracle::of(&prompts, |sink| data.steps(sink));
        let wrong = wrong(index, &prompts, &hashes, &oracle.expected);
        measured = Some((bytes, wrong));
    });
    let (bytes, wrong) = measured.context("the index was not loaded")?;
    let (entries, blocks) = count(&data);
    let measured = Measured {
        entries,
        blocks,
        bytes,
        wrong,
    };
    println!("{}", serde_json::to_string(&measured)?);
    Ok(())
}

/// Bytes asked of the allocator and not given back.
fn live() -> usize {
    let stats = ALLOCATOR.stats();
    stats
        .bytes_allocated
        .saturating_sub(stats.bytes_deallocated)
}
