// SPDX-License-Identifier: Apache-2.0

//! `kvdelta replay` beside what it stands for: real engines, and Dynamo's own simulation.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::cache::{Cache, members, project_root};
use crate::command::{logged, output};
use crate::frontend;
use crate::progress::{Step, say};
use crate::report::Report;

/// What replay may be off from what real engines moved.
const TOLERANCE: f64 = 0.05;
/// Where costs are equal chance decides; so many replays show what it may do. With the small main job each way in which
/// prefixes fall on two workers comes up in as many, all but surely.
const DRAWS: usize = 500;
/// Room for all that is sent, at every worker.
const ROOMY_BLOCKS: usize = 100_000;

/// What `kvdelta replay --json` says, as far as it is compared.
#[derive(Debug, Deserialize)]
struct Replayed {
    rows: Vec<Row>,
}

#[derive(Debug, Deserialize)]
struct Row {
    moved_bytes: u64,
    saved_share: f64,
}

/// What Dynamo's replay says.
#[derive(Debug, Deserialize)]
struct DynamoRow {
    saved_share: f64,
}

/// `kvdelta`, built.
fn program(cache: &Cache) -> Result<PathBuf> {
    let target = cache.target("workspace", &members())?;
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--locked", "--package", "kvdelta"])
        .current_dir(project_root())
        .env("CARGO_TARGET_DIR", &target);
    frontend::without_own_package(&mut cargo);
    let log = cache.folder("logs")?.join("kvdelta.log");
    logged("kvdelta", cargo, &log)?;
    Ok(target.join("debug/kvdelta"))
}

/// A replay of `trace`, of one row.
fn replay(program: &Path, trace: &Path, arguments: &[&str]) -> Result<Row> {
    let mut command = Command::new(program);
    command.arg("replay").arg("--trace").arg(trace);
    command.args(arguments).arg("--json");
    let replayed: Replayed = serde_json::from_str(&output(command)?)?;
    let mut rows = replayed.rows.into_iter();
    rows.next().context("kvdelta replay has no row")
}

/// Sends the main job's requests, of which `trace` tells, through `kvdelta replay`, and says where what it moves is not
/// what the engines moved.
pub(crate) fn engines(cache: &Cache, report: &Report, trace: &Path) -> Result<Vec<String>> {
    let program = program(cache)?;
    let step = Step::begin("the main job by kvdelta replay");
    let fleet = [
        ("--block-size", report.block_size.to_string()),
        ("--block-bytes", report.block_bytes.to_string()),
        ("--prefill", report.prefill_workers.to_string()),
        ("--decode", report.decode_workers.to_string()),
        ("--capacity", ROOMY_BLOCKS.to_string()),
    ];
    let moved = |policy: &[&str], seed: usize| {
        let seed = seed.to_string();
        let fleet = fleet.iter().flat_map(|(name, value)| [*name, value]);
        let arguments: Vec<&str> = fleet.chain(["--seed", &seed]).collect();
        let row = replay(&program, trace, &[policy, &arguments].concat())?;
        anyhow::Ok(row.moved_bytes)
    };
    let drawn: Vec<u64> = (0..DRAWS)
        .map(|seed| moved(&["--policy", "load"], seed))
        .collect::<Result<_>>()?;
    let mut wrong = Vec::new();
    for run in &report.runs {
        // Of conditional disaggregation there is no simulation.
        if run.routing.conditional_disagg {
            continue;
        }
        let weight = run.routing.weight;
        let (least, most) = if weight > 0.0 {
            let policy = ["--policy", "overlap", "--weight", &weight.to_string()];
            let moved = moved(&policy, 0)?;
            (moved, moved)
        } else {
            let [least, most] = [drawn.iter().min(), drawn.iter().max()];
            least.copied().zip(most.copied()).context("no draws")?
        };
        let real: u64 = run.workloads.iter().map(|one| one.moved_bytes).sum();
        let said = format!("{run}: {real} bytes moved, {least} to {most} by kvdelta replay");
        say(&said);
        if !is_near(real, least, most) {
            wrong.push(said);
        }
    }
    step.end();
    Ok(wrong)
}

/// Whether `real` lies between the two, or no more than [`TOLERANCE`] beside them.
fn is_near(real: u64, least: u64, most: u64) -> bool {
    let real = real as f64;
    real >= least as f64 * (1.0 - TOLERANCE) && real <= most as f64 * (1.0 + TOLERANCE)
}

/// The size of a made trace for both simulations.
#[derive(Debug, Clone, Copy)]
struct Shape {
    requests: usize,
    /// Between two requests.
    gap_ms: usize,
    /// Each so many-th request is the only one of its conversation and runs to the end of the trace; 0: none.
    long_every: usize,
    /// Tokens of the answers of those.
    long_tokens: usize,
    /// Tokens of other answers.
    answer_tokens: usize,
    /// Blocks of each worker.
    capacity: usize,
}

/// Requests that come when those before have ended, all but some that never do: so what the router sees does not depend
/// on how long anything takes. Their prompts are of whole blocks, of which each simulation counts as many.
const APART: Shape = Shape {
    requests: 200,
    gap_ms: 700,
    long_every: 12,
    long_tokens: 40_000,
    answer_tokens: 20,
    capacity: ROOMY_BLOCKS,
};
/// Requests as they come, several at once, on workers that are too small for all of them.
const TOGETHER: Shape = Shape {
    requests: 600,
    gap_ms: 250,
    long_every: 0,
    long_tokens: 0,
    answer_tokens: 300,
    capacity: 160,
};

/// Tokens of a block.
const BLOCK_TOKENS: usize = 512;
/// Blocks of the prompts with which conversations begin.
const SYSTEM_BLOCKS: [usize; 3] = [2, 4, 8];
/// Tokens that a turn adds at most, and at least.
const TURN_TOKENS: std::ops::Range<usize> = 200..1900;
/// A conversation of more ends.
const LONGEST_TOKENS: usize = 12 * BLOCK_TOKENS;
/// The share of requests with which a conversation begins.
const BEGINNINGS: f64 = 0.35;
/// Blocks that a long request adds at most.
const LONG_BLOCKS: usize = 5;
/// The weight at which both choose, and one at which some of these choices must be wrong.
const WEIGHT: &str = "2";
const OTHER_WEIGHT: &str = "0.25";
const DECODE_WORKERS: &str = "4";
const PREFILL_WORKERS: &str = "4";
const SEED: u64 = 1;

/// A conversation: a number for each block, and its tokens.
#[derive(Debug, Clone, Default)]
struct Spoken {
    blocks: Vec<usize>,
    tokens: usize,
}

impl Spoken {
    /// With `tokens` more; blocks that become whole get new numbers.
    fn grown(&self, tokens: usize, next: &mut usize) -> Self {
        let mut grown = self.clone();
        grown.tokens += tokens;
        while grown.blocks.len() < grown.tokens / BLOCK_TOKENS {
            grown.blocks.push(*next);
            *next += 1;
        }
        grown
    }
}

impl Shape {
    /// A trace in Mooncake's format: conversations that begin with one of few prompts.
    fn trace(self, seed: u64) -> String {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut next = 0;
        let system =
            SYSTEM_BLOCKS.map(|blocks| Spoken::default().grown(blocks * BLOCK_TOKENS, &mut next));
        let mut open: Vec<Spoken> = Vec::new();
        let mut lines = String::new();
        for number in 0..self.requests {
            let is_long = self.long_every > 0 && number % self.long_every == self.long_every - 1;
            let begins = is_long || open.is_empty() || random.f64() < BEGINNINGS;
            let before = if begins {
                system[random.usize(..system.len())].clone()
            } else {
                open.swap_remove(random.usize(..open.len()))
            };
            let mut added = random.usize(TURN_TOKENS);
            if is_long {
                added = random.usize(1..=LONG_BLOCKS) * BLOCK_TOKENS;
            } else if (before.tokens + added).is_multiple_of(BLOCK_TOKENS) {
                // The block of the last token is not looked up here, but by Dynamo.
                added += 1;
            }
            let prompt = before.grown(added, &mut next);
            let mut ids = prompt.blocks.clone();
            if ids.len() < prompt.tokens.div_ceil(BLOCK_TOKENS) {
                ids.push(next);
                next += 1;
            }
            let answer_tokens = if is_long {
                self.long_tokens
            } else {
                self.answer_tokens
            };
            let line = serde_json::json!({
                "timestamp": number * self.gap_ms,
                "input_length": prompt.tokens,
                "output_length": answer_tokens,
                "hash_ids": ids,
            });
            lines.push_str(&format!("{line}\n"));
            if !is_long && prompt.tokens < LONGEST_TOKENS {
                open.push(prompt.grown(answer_tokens, &mut next));
            }
        }
        lines
    }
}

/// Where Dynamo's simulation sent a request.
#[derive(Debug, Deserialize)]
struct Sent {
    cached: usize,
    held: usize,
}

/// What `kvdelta replay` says of that choice.
#[derive(Debug, Deserialize)]
struct Judged {
    cached: usize,
    held: usize,
    cheapest: usize,
    is_cheapest: bool,
}

/// Dynamo's choices in the eyes of `kvdelta replay`, which followed them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Agreement {
    /// Requests for which one worker costs least, and those of them that Dynamo sent there.
    decided: usize,
    decided_alike: usize,
    /// Requests for which several cost least, and those that went to one of them.
    drawn: usize,
    drawn_alike: usize,
    /// Requests of which both routers count as many blocks at the worker, and of which both workers had as many.
    cached_alike: usize,
    held_alike: usize,
}

impl Agreement {
    fn of(sent: &[Sent], judged: &[Judged]) -> Result<Self> {
        ensure!(
            sent.len() == judged.len(),
            "{} choices of {} requests",
            sent.len(),
            judged.len()
        );
        let mut all = Self::default();
        for (sent, judged) in sent.iter().zip(judged) {
            let alike = usize::from(judged.is_cheapest);
            if judged.cheapest == 1 {
                all.decided += 1;
                all.decided_alike += alike;
            } else {
                all.drawn += 1;
                all.drawn_alike += alike;
            }
            all.cached_alike += usize::from(sent.cached == judged.cached);
            all.held_alike += usize::from(sent.held == judged.held);
        }
        Ok(all)
    }

    fn is_whole(&self) -> bool {
        let all = self.decided + self.drawn;
        self.decided_alike == self.decided
            && self.drawn_alike == self.drawn
            && [self.cached_alike, self.held_alike] == [all; 2]
    }
}

impl fmt::Display for Agreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.decided + self.drawn;
        write!(
            f,
            "{} of {} choices with one best alike, {} of {} among several; equal overlap {} and equal hits {} of {all}",
            self.decided_alike,
            self.decided,
            self.drawn_alike,
            self.drawn,
            self.cached_alike,
            self.held_alike
        )
    }
}

/// Sends made requests through Dynamo's simulation, lets `kvdelta replay` follow its choices, and fails where the two
/// choose otherwise although nothing may tell them apart.
pub(crate) fn simulation(cache: &Cache) -> Result<()> {
    let programs = [frontend::example(cache, "fleet_replay")?, program(cache)?];
    let apart = Both::run(cache, &programs, APART, WEIGHT)?;
    say(format!("requests apart: {apart}"));
    ensure!(
        apart.agreement.is_whole() && apart.agreement.decided > APART.requests / 2,
        "of requests that do not meet each choice must be alike: {apart}"
    );
    let control = Both::run(cache, &programs, APART, OTHER_WEIGHT)?;
    ensure!(
        control.agreement.decided_alike < control.agreement.decided,
        "weight {OTHER_WEIGHT} must not choose as {WEIGHT} does: {control}"
    );
    // How long things take differs, and with it who is there when another comes: nothing to hold it to.
    let together = Both::run(cache, &programs, TOGETHER, WEIGHT)?;
    say(format!("requests at once, with eviction: {together}"));
    Ok(())
}

/// What the two made of a trace.
#[derive(Debug)]
struct Both {
    agreement: Agreement,
    /// Shares saved: by Dynamo, by the same choices here, by own choices.
    saved: [f64; 3],
}

impl fmt::Display for Both {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [dynamo, followed, own] = self.saved.map(|share| share * 100.0);
        let Self { agreement, .. } = self;
        write!(
            f,
            "{agreement}; saved {dynamo:.1}% by Dynamo's, {followed:.1}% by its choices here, {own:.1}% by own choices"
        )
    }
}

impl Both {
    /// Dynamo chooses with [`WEIGHT`], `kvdelta replay` judges with `weight`.
    fn run(
        cache: &Cache,
        [dynamo, kvdelta]: &[PathBuf; 2],
        shape: Shape,
        weight: &str,
    ) -> Result<Self> {
        let folder = tempfile::tempdir_in(cache.folder("runs")?)?;
        let file = |name: &str| folder.path().join(name);
        let (trace, sent, judged) = (file("trace"), file("sent"), file("judged"));
        fs::write(&trace, shape.trace(SEED))?;
        let capacity = shape.capacity.to_string();
        let fleet = [
            ("--prefill", PREFILL_WORKERS),
            ("--decode", DECODE_WORKERS),
            ("--capacity", &capacity),
        ];
        let fleet = fleet.map(|(name, value)| [name, value]).concat();
        let mut command = Command::new(dynamo);
        command.arg("--trace").arg(&trace).args(&fleet);
        command.args(["--weights", WEIGHT, "--json", "--choices"]);
        command.arg(&sent);
        let rows: Vec<DynamoRow> = serde_json::from_str(&output(command)?)?;
        let own = ["--policy", "overlap", "--weight", weight];
        let own = [&fleet[..], &own].concat();
        let paths = [&sent, &judged].map(|path| path.to_string_lossy().into_owned());
        let files = ["--follow", &paths[0], "--choices", &paths[1]];
        let followed = replay(kvdelta, &trace, &[&own[..], &files].concat())?;
        let dynamo = rows.first().context("no row of Dynamo's replay")?;
        Ok(Self {
            agreement: Agreement::of(&lines(&sent)?, &lines(&judged)?)?,
            saved: [
                dynamo.saved_share,
                followed.saved_share,
                replay(kvdelta, &trace, &own)?.saved_share,
            ],
        })
    }
}

fn lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let text = fs::read_to_string(path)?;
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().context("a line of choices")
}
