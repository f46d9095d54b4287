// SPDX-License-Identifier: Apache-2.0

//! What one (worker, block) pair takes, each index in a process of its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::contender::Contender;
use crate::data::{BLOCKS_OF_ID, Change, Data, WORKERS};
use crate::progress::Progress;
use crate::query::check;
use crate::trace::Trace;

/// The kinds of data.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Every block on all workers.
    Everywhere,
    /// Prefixes shared by all, half and an eighth of the workers.
    Tree,
    /// A trace over bounded caches.
    Trace,
    /// Nothing shared, a block an event.
    Decode,
}

impl Kind {
    /// About `entries` pairs of this kind; the trace is needed for its own only.
    pub fn data(self, entries: usize, trace: Option<&Trace>) -> Option<Data> {
        Some(match self {
            Self::Everywhere => Data::Everywhere { entries },
            Self::Tree => Data::Tree { entries },
            Self::Decode => Data::Decode {
                entries,
                sequences: 32,
            },
            Self::Trace => {
                let trace = trace?;
                let wanted = entries / BLOCKS_OF_ID;
                // A seventh of the ids is found in a cache; the rest fills all caches and evicts some.
                let (requests, passes) = trace.with_ids(wanted * 3 / 2);
                Data::Trace {
                    trace: trace.first(requests),
                    passes,
                    capacity: wanted / WORKERS,
                }
            }
        })
    }

    /// The word for the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Everywhere => "everywhere",
            Self::Tree => "tree",
            Self::Trace => "trace",
            Self::Decode => "decode",
        }
    }
}

/// What the process of one index tells.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// (worker, block) pairs held at the end.
    pub entries: usize,
    /// Different blocks among them.
    pub blocks: usize,
    /// Bytes asked of the allocator and not given back, events and data not counted.
    pub bytes: usize,
    /// Answers that differ from the oracle's.
    pub wrong: usize,
}

impl Measured {
    /// Bytes for one pair.
    pub fn per_entry(&self) -> f64 {
        let number = |count: usize| u32::try_from(count / 64).map_or(f64::INFINITY, f64::from);
        number(self.bytes) / number(self.entries)
    }
}

/// What was measured for one kind of data.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Of which kind.
    pub kind: Kind,
    /// By index.
    pub measured: BTreeMap<Contender, Measured>,
    /// Bytes for one pair, by index.
    pub per_entry: BTreeMap<Contender, f64>,
    /// The peer that takes least of those that serve readers, and ours by its.
    pub ratio: Option<(Contender, f64)>,
}

/// What is aimed at.
pub const GOAL: f64 = 0.5;

/// What to measure.
#[derive(Debug)]
pub struct Plan {
    /// The indexes.
    pub contenders: Vec<Contender>,
    /// The kinds of data.
    pub kinds: Vec<Kind>,
    /// About how many pairs.
    pub entries: usize,
    /// The trace's file.
    pub trace: Option<PathBuf>,
}

/// Runs a process for each index and kind.
pub fn run(plan: &Plan, progress: &mut Progress) -> Result<Vec<Row>> {
    let program = std::env::current_exe()?.with_file_name("bench-index-memory");
    let mut rows = Vec::new();
    for kind in &plan.kinds {
        let mut measured = BTreeMap::new();
        for contender in &plan.contenders {
            progress.say(|| format!("memory: {}, {contender}", kind.name()));
            let told = child(&program, plan, *kind, *contender)?;
            check(*contender, told.wrong, kind.name())?;
            measured.insert(*contender, told);
        }
        let per_entry: BTreeMap<_, _> = measured
            .iter()
            .map(|(contender, measured)| (*contender, measured.per_entry()))
            .collect();
        let leanest = per_entry
            .iter()
            .filter(|(peer, _)| **peer != Contender::Kvdelta && peer.serves_readers())
            .min_by(|a, b| a.1.total_cmp(b.1));
        let ours = per_entry.get(&Contender::Kvdelta);
        let ratio = ours
            .zip(leanest)
            .map(|(ours, (peer, theirs))| (*peer, ours / theirs));
        rows.push(Row {
            kind: *kind,
            measured,
            per_entry,
            ratio,
        });
    }
    Ok(rows)
}

fn child(program: &Path, plan: &Plan, kind: Kind, contender: Contender) -> Result<Measured> {
    let mut command = Command::new(program);
    command
        .arg(serde_json::to_string(&contender)?.trim_matches('"'))
        .arg(kind.name())
        .arg(plan.entries.to_string());
    if let Some(trace) = &plan.trace {
        command.arg("--trace").arg(trace);
    }
    let output = command
        .stderr(std::process::Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(
        output.status.success(),
        "{} {} {contender} failed ({})",
        program.display(),
        kind.name(),
        output.status
    );
    serde_json::from_slice(&output.stdout).context("the memory of an index")
}

/// Pairs that the data leaves, and different blocks among them.
pub fn count(data: &Data) -> (usize, usize) {
    let mut holders: std::collections::HashMap<u64, usize> = std::collections::HashMap::new();
    let mut entries = 0;
    data.steps(&mut |step| match step.change {
        Change::Stored { blocks, .. } => {
            entries += blocks.len();
            for block in blocks {
                *holders.entry(block.sequence.0).or_default() += 1;
            }
        }
        Change::Removed(blocks) => {
            entries -= blocks.len();
            for block in blocks {
                if let Some(count) = holders.get_mut(&block.sequence.0) {
                    *count -= 1;
                    if *count == 0 {
                        holders.remove(&block.sequence.0);
                    }
                }
            }
        }
    });
    (entries, holders.len())
}
