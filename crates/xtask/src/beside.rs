// SPDX-License-Identifier: Apache-2.0

//! `kvdelta replay` beside what it stands for: real engines, and Dynamo's own simulation.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cache::{Cache, members};
use crate::command::{logged, output};
use crate::frontend;
use crate::progress::{Step, say};
use crate::report::{Measured, Report};
use crate::test::workspace_cargo;

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

/// The command line `kvdelta`, built with what the tests of the workspace have built.
pub(crate) fn program(cache: &Cache) -> Result<PathBuf> {
    let build = workspace_cargo(cache, &["build", "--locked", "--package=kvdelta"])?;
    logged("kvdelta", build, &cache.folder("logs")?.join("kvdelta.log"))?;
    let target = cache.target("workspace", &members())?;
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
        .map(|draw| moved(&["--policy", "load"], draw))
        .collect::<Result<_>>()?;
    let pooled = moved(&["--policy", "pooled"], 0)?;
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
        let sum = |bytes: fn(&Measured) -> u64| run.workloads.iter().map(bytes).sum::<u64>();
        let real = sum(|one| one.moved_bytes);
        // One cache for all, of real workers, holds also what answers add to a conversation.
        let answers = pooled.saturating_sub(sum(|one| one.once_bytes));
        let said = format!(
            "{run}: {real} bytes moved, {least} to {most} by kvdelta replay, of them {answers} for answers at most"
        );
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

/// Weights: Dynamo chooses by the first one; by the second one some of these choices must be wrong.
const WEIGHT: &str = "2";
const OTHER_WEIGHT: &str = "0.25";
/// The fleet of both simulations.
const FLEET: [&str; 4] = ["--prefill", "4", "--decode", "4"];
/// A fleet in which only decode takes time, a tenth of a millisecond a token.
const TIMES: [&str; 8] = [
    "--prefill-rate",
    "inf",
    "--link",
    "inf",
    "--itl",
    "0.1",
    "--itl-per-token",
    "0",
];
const TOKENS_A_MS: f64 = 10.0;
/// Choices that must be alike where requests meet; the two free memory in another order, and requests end a little
/// earlier or later.
const ALIKE: f64 = 0.97;

/// The size of a made trace.
#[derive(Debug, Clone, Copy)]
struct Shape {
    requests: usize,
    /// Between two requests.
    gap_ms: usize,
    /// Tokens of an answer.
    answer_tokens: usize,
    /// Each so many-th request is the only one of its conversation, with an answer of `long_tokens`; 0: none.
    long_every: usize,
    long_tokens: usize,
    /// Blocks of each worker.
    capacity: usize,
}

/// Requests that come when those before have ended, all but some that never do: so what a router sees does not depend
/// on how long anything takes.
const APART: Shape = Shape {
    requests: 200,
    gap_ms: 2000,
    answer_tokens: 20,
    long_every: 12,
    long_tokens: 100_000,
    capacity: ROOMY_BLOCKS,
};
/// Requests that meet, on workers that are too small for all of them.
const TOGETHER: Shape = Shape {
    requests: 1000,
    gap_ms: 150,
    answer_tokens: 300,
    long_every: 0,
    long_tokens: 0,
    capacity: 250,
};

/// Tokens of a block.
const BLOCK_TOKENS: usize = 512;
/// Blocks of the prompts with which conversations begin.
const SYSTEM_BLOCKS: [usize; 3] = [2, 4, 8];
/// Blocks that a turn adds. Prompts are of whole blocks: of one begun the routers book different counts.
const TURN_BLOCKS: std::ops::RangeInclusive<usize> = 1..=5;
/// A conversation of more ends.
const LONGEST_TOKENS: usize = 16 * BLOCK_TOKENS;
/// The share of requests with which a conversation begins.
const BEGINNINGS: f64 = 0.3;
const SEED: u64 = 1;

/// A request, as a line of Mooncake's format.
#[derive(Debug, Clone, Serialize)]
struct Request {
    timestamp: f64,
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<usize>,
}

impl Shape {
    /// Conversations that begin with one of few prompts.
    fn requests(self) -> Vec<Request> {
        let mut random = fastrand::Rng::with_seed(SEED);
        let mut ids = 0..;
        let system = SYSTEM_BLOCKS.map(|blocks| ids.by_ref().take(blocks).collect::<Vec<_>>());
        let mut open: Vec<Vec<usize>> = Vec::new();
        let mut requests = Vec::new();
        for number in 0..self.requests {
            let is_long = self.long_every > 0 && number % self.long_every == self.long_every - 1;
            let mut blocks = if is_long || open.is_empty() || random.f64() < BEGINNINGS {
                system[random.usize(..system.len())].clone()
            } else {
                open.swap_remove(random.usize(..open.len()))
            };
            // Behind an answer, of which it has no block, a turn goes on with new ones.
            blocks.extend(ids.by_ref().take(random.usize(TURN_BLOCKS)));
            let input_length = blocks.len() * BLOCK_TOKENS;
            if !is_long && input_length < LONGEST_TOKENS {
                open.push(blocks.clone());
            }
            requests.push(Request {
                timestamp: (number * self.gap_ms) as f64,
                input_length,
                output_length: if is_long {
                    self.long_tokens
                } else {
                    self.answer_tokens
                },
                hash_ids: blocks,
            });
        }
        requests
    }
}

/// Where Dynamo's simulation sent a request, and when.
#[derive(Debug, Clone, Deserialize, Serialize)]
struct Sent {
    decode: usize,
    cached: usize,
    chosen_ms: f64,
    ended_ms: f64,
}

/// What `kvdelta replay` says of that choice.
#[derive(Debug, Deserialize)]
struct Judged {
    cached: usize,
    cheapest: usize,
    is_cheapest: bool,
}

/// Dynamo's choices in the eyes of `kvdelta replay`, which followed them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Agreement {
    /// Requests for which one worker costs least, and those of them that Dynamo sent there.
    decided: usize,
    decided_alike: usize,
    /// Requests for which several cost least, and those that Dynamo sent to one of them.
    drawn: usize,
    drawn_alike: usize,
    /// Requests of which both routers count as many blocks at the worker.
    cached_alike: usize,
}

impl Agreement {
    fn of(sent: &[Sent], judged: &[Judged]) -> Self {
        let mut all = Self::default();
        for (sent, judged) in sent.iter().zip(judged) {
            let (count, alike) = match judged.cheapest {
                1 => (&mut all.decided, &mut all.decided_alike),
                _ => (&mut all.drawn, &mut all.drawn_alike),
            };
            *count += 1;
            *alike += usize::from(judged.is_cheapest);
            all.cached_alike += usize::from(sent.cached == judged.cached);
        }
        all
    }

    /// The least of the three shares that are alike.
    fn share(&self) -> f64 {
        let share = |alike: usize, all: usize| alike as f64 / all.max(1) as f64;
        let all = self.decided + self.drawn;
        [
            share(self.decided_alike, self.decided),
            share(self.decided_alike + self.drawn_alike, all),
            share(self.cached_alike, all),
        ]
        .into_iter()
        .fold(1.0, f64::min)
    }
}

impl fmt::Display for Agreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} choices with one best and {} of {} with several alike, overlap alike in {}",
            self.decided_alike, self.decided, self.drawn_alike, self.drawn, self.cached_alike,
        )
    }
}

/// Sends made requests through Dynamo's simulation and lets `kvdelta replay` follow its choices; fails where it would
/// have chosen otherwise.
pub(crate) fn simulation(cache: &Cache) -> Result<()> {
    let dynamo = frontend::example(cache, "fleet_replay")?;
    let kvdelta = program(cache)?;
    let folder = tempfile::tempdir_in(cache.folder("runs")?)?;
    let both = Both {
        dynamo: &dynamo,
        kvdelta: &kvdelta,
        folder: folder.path(),
    };

    let requests = APART.requests();
    let (sent, by_dynamo) = both.sent(APART, &requests)?;
    let (apart, by_us) = both.judged(APART, WEIGHT, &[], &requests, &sent)?;
    say(format!(
        "apart: {apart}; {by_dynamo:.4} saved by Dynamo's count, {by_us:.4} by ours"
    ));
    ensure!(
        apart.decided > APART.requests / 2 && apart.share() == 1.0,
        "of requests that do not meet, each choice must be alike: {apart}"
    );
    ensure!(
        (by_dynamo - by_us).abs() < 1e-6,
        "the same choices must save the same: {by_dynamo} and {by_us}"
    );
    let (other, _) = both.judged(APART, OTHER_WEIGHT, &[], &requests, &sent)?;
    ensure!(
        other.decided_alike < other.decided,
        "weight {OTHER_WEIGHT} must not choose as {WEIGHT} does: {other}"
    );

    let requests = TOGETHER.requests();
    let (sent, by_dynamo) = both.sent(TOGETHER, &requests)?;
    let (timed, order) = timed(&requests, &sent);
    let (together, by_us) = both.judged(TOGETHER, WEIGHT, &TIMES, &timed, &order)?;
    say(format!(
        "together, each at its worker as long as in Dynamo's: {together}; {by_dynamo:.4} saved by Dynamo's count, \
         {by_us:.4} by ours"
    ));
    ensure!(
        together.share() >= ALIKE,
        "where only times are given, nearly all choices must be alike: {together}"
    );
    // Of what takes how long the two have ideas of their own: nothing to hold it to.
    let (own, by_us) = both.judged(TOGETHER, WEIGHT, &[], &requests, &sent)?;
    say(format!(
        "together, times by kvdelta replay: {own}; {by_us:.4} saved by ours"
    ));
    Ok(())
}

/// The requests as they came to decode, in that order, each with an answer as long as it was there by [`TIMES`].
fn timed(requests: &[Request], sent: &[Sent]) -> (Vec<Request>, Vec<Sent>) {
    let mut both: Vec<(&Request, &Sent)> = requests.iter().zip(sent).collect();
    both.sort_by(|(_, left), (_, right)| left.chosen_ms.total_cmp(&right.chosen_ms));
    let timed = both.iter().map(|(request, sent)| {
        let tokens = (sent.ended_ms - sent.chosen_ms) * TOKENS_A_MS;
        Request {
            timestamp: sent.chosen_ms,
            output_length: whole(tokens).max(1),
            ..(*request).clone()
        }
    });
    let order = both.iter().map(|(_, sent)| (*sent).clone());
    (timed.collect(), order.collect())
}

/// A time in whole tokens.
fn whole(tokens: f64) -> usize {
    format!("{tokens:.0}").parse().unwrap_or_default()
}

/// The two simulations.
#[derive(Debug)]
struct Both<'a> {
    dynamo: &'a Path,
    kvdelta: &'a Path,
    folder: &'a Path,
}

impl Both<'_> {
    /// What Dynamo does with the requests, and the share that it saves.
    fn sent(&self, shape: Shape, requests: &[Request]) -> Result<(Vec<Sent>, f64)> {
        let (trace, sent) = (self.folder.join("trace"), self.folder.join("sent"));
        write_lines(&trace, requests)?;
        let mut command = Command::new(self.dynamo);
        command
            .args(FLEET)
            .args(["--capacity", &shape.capacity.to_string()])
            .args(["--weights", WEIGHT, "--json", "--trace"])
            .arg(&trace)
            .arg("--choices")
            .arg(&sent);
        let rows: Vec<DynamoRow> = serde_json::from_str(&output(command)?)?;
        let row = rows.first().context("no row of Dynamo's replay")?;
        Ok((lines(&sent, requests.len())?, row.saved_share))
    }

    /// What `kvdelta replay` says of these choices, and the share that it saves by them.
    fn judged(
        &self,
        shape: Shape,
        weight: &str,
        times: &[&str],
        requests: &[Request],
        sent: &[Sent],
    ) -> Result<(Agreement, f64)> {
        let file = |name: &str| self.folder.join(name);
        let (trace, follow, judged) = (file("trace"), file("follow"), file("judged"));
        write_lines(&trace, requests)?;
        write_lines(&follow, sent)?;
        let paths = [&follow, &judged].map(|path| path.to_string_lossy().into_owned());
        let capacity = shape.capacity.to_string();
        let policy = ["--policy", "overlap", "--weight", weight];
        let files = ["--follow", &paths[0], "--choices", &paths[1]];
        let arguments = [&FLEET, times, &["--capacity", &capacity], &policy, &files];
        let row = replay(self.kvdelta, &trace, &arguments.concat())?;
        let judged = lines(&judged, requests.len())?;
        Ok((Agreement::of(sent, &judged), row.saved_share))
    }
}

fn write_lines(path: &Path, lines: &[impl Serialize]) -> Result<()> {
    let mut text = String::new();
    for line in lines {
        text.push_str(&serde_json::to_string(line)?);
        text.push('\n');
    }
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The lines of a file, of which there must be so many.
fn lines<T: DeserializeOwned>(path: &Path, count: usize) -> Result<Vec<T>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines: Vec<T> = text
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .with_context(|| format!("{} cannot be understood", path.display()))?;
    ensure!(
        lines.len() == count,
        "{}: {} lines of {count}",
        path.display(),
        lines.len()
    );
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_percent_beside_the_range_is_near() {
        for (real, is) in [
            (94, false),
            (95, true),
            (150, true),
            (210, true),
            (211, false),
        ] {
            assert_eq!(is_near(real, 100, 200), is, "{real}");
        }
    }

    #[test]
    fn agreement_is_the_least_share() {
        let sent = |cached| Sent {
            decode: 0,
            cached,
            chosen_ms: 0.0,
            ended_ms: 1.0,
        };
        let judged = |cheapest, is_cheapest| Judged {
            cached: 3,
            cheapest,
            is_cheapest,
        };
        let all = [judged(1, true), judged(1, false), judged(2, true)];
        let agreement = Agreement::of(&[sent(3), sent(3), sent(2)], &all);
        assert_eq!(
            agreement,
            Agreement {
                decided: 2,
                decided_alike: 1,
                drawn: 1,
                drawn_alike: 1,
                cached_alike: 2,
            }
        );
        assert_eq!(agreement.share(), 0.5);
        assert_eq!(Agreement::of(&[sent(3)], &all[..1]).share(), 1.0);
    }

    #[test]
    fn requests_get_the_times_that_they_had_at_decode() {
        let requests = Shape {
            requests: 2,
            ..APART
        }
        .requests();
        let at = |chosen_ms, ended_ms| Sent {
            decode: 0,
            cached: 0,
            chosen_ms,
            ended_ms,
        };
        let (timed, order) = timed(&requests, &[at(9.0, 12.5), at(4.0, 4.0)]);
        let times: Vec<_> = timed
            .iter()
            .map(|one| (one.timestamp, one.output_length))
            .collect();
        assert_eq!(times, [(4.0, 1), (9.0, 35)]);
        assert_eq!(timed[0].hash_ids, requests[1].hash_ids);
        assert_eq!(order[0].chosen_ms, 4.0);
    }

    #[test]
    fn a_made_trace_is_the_same_each_time_and_shares_prefixes() {
        let [first, again] = [APART, APART].map(|shape| {
            let requests = shape.requests();
            requests
                .into_iter()
                .map(|one| one.hash_ids)
                .collect::<Vec<_>>()
        });
        assert_eq!(first, again);
        let shared = first.iter().filter(|ids| ids[0] == first[0][0]).count();
        assert!(shared > 10 && shared < first.len(), "{shared}");
    }
}
