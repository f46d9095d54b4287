// SPDX-License-Identifier: Apache-2.0

//! How fast one thread puts events in, and how long another one waits for answers meanwhile.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use cpu_time::ThreadTime;
use kvdelta_indexer::BlockHash;
use serde::Serialize;

use crate::contender::{Contender, Reader, Watch, Way, load};
use crate::data::{Data, Recording};
use crate::oracle::Oracle;
use crate::progress::Progress;
use crate::query::{check, hashes, wrong};
use crate::spread::{Spread, percentile};

/// Latencies that there is room for at first; more of them cost the reader, not its latency.
const LATENCIES: usize = 1 << 22;

/// What was measured for one kind of data.
#[derive(Debug, Serialize)]
pub struct Row {
    /// What the events are of.
    pub name: &'static str,
    /// How many there are.
    pub events: usize,
    /// Blocks that they store or remove.
    pub blocks: usize,
    /// By index and way in.
    pub speeds: Vec<Speed>,
    /// Our blocks a second by those of the fastest peer that serves readers, both while one reads.
    pub ratio: Option<Ratio>,
    /// The same by the writers' processor time, which other programs on the machine disturb less.
    pub processor_ratio: Option<Ratio>,
    /// Our 99th percentile by that of the best peer.
    pub p99_ratio: Option<Ratio>,
}

/// Ours beside the best peer's.
#[derive(Debug, Serialize)]
pub struct Ratio {
    /// The peer with the best median.
    pub peer: Contender,
    /// And its way in.
    pub way: Way,
    /// Ours by the peer's, round by round.
    pub ratio: Spread,
    /// What is aimed at.
    pub goal: f64,
}

/// What one index did.
#[derive(Debug, Serialize)]
pub struct Speed {
    /// The index.
    pub contender: Contender,
    /// Who writes.
    pub way: Way,
    /// Blocks a second with nobody reading.
    pub alone: Spread,
    /// Blocks a second with one reader; `None`: it has none.
    pub read: Option<Read>,
    /// Answers that differ from the oracle's after the load, over all rounds.
    pub wrong: usize,
    #[serde(skip)]
    alone_rounds: Vec<f64>,
    #[serde(skip)]
    read_rounds: Vec<f64>,
    #[serde(skip)]
    processor_rounds: Vec<f64>,
    #[serde(skip)]
    p50_rounds: Vec<f64>,
    #[serde(skip)]
    p99_rounds: Vec<f64>,
    #[serde(skip)]
    queries_rounds: Vec<f64>,
}

/// What went on while one thread read.
#[derive(Debug, Serialize)]
pub struct Read {
    /// Blocks a second of the writer.
    pub blocks: Spread,
    /// Blocks a second of the measured thread's processor time; `None`: another thread writes.
    pub of_processor: Option<Spread>,
    /// Queries a second of the reader.
    pub queries: Spread,
    /// Median of the reader's latency, in nanoseconds.
    pub p50: Spread,
    /// 99th percentile of the reader's latency, in nanoseconds.
    pub p99: Spread,
}

/// What to measure.
#[derive(Debug)]
pub struct Plan {
    /// The indexes.
    pub contenders: Vec<Contender>,
    /// Rounds, in each of which every index has its turn.
    pub rounds: usize,
    /// The events.
    pub data: Vec<Data>,
}

/// Loads all data of the plan.
pub fn run(plan: &Plan, progress: &mut Progress) -> Result<Vec<Row>> {
    let data = plan.data.iter();
    data.map(|data| run_data(plan, data, progress)).collect()
}

fn run_data(plan: &Plan, data: &Data, progress: &mut Progress) -> Result<Row> {
    let prompts = data.prompts(64);
    let hashes: Vec<_> = prompts.iter().map(|prompt| hashes(prompt)).collect();
    // They are spread over the data in its order, so half of the way these are in.
    let early = &hashes[..hashes.len().div_ceil(2)];
    let recording = Recording::of(std::slice::from_ref(data));
    let oracle = Oracle::of(&prompts, |sink| recording.steps(sink));
    let (events, blocks) = recording.size();
    let all = plan.contenders.iter().flat_map(|contender| {
        let ways = contender.ways().iter();
        ways.map(|way| Speed::new(*contender, *way))
    });
    let mut speeds: Vec<Speed> = all.collect();
    for round in 0..plan.rounds {
        let turns = speeds.len();
        for turn in 0..turns {
            let speed = &mut speeds[(turn + round) % turns];
            let (contender, way) = (speed.contender, speed.way);
            progress.say(|| {
                let name = data.name();
                format!(
                    "ingest: {name}, round {} of {}, {contender}",
                    round + 1,
                    plan.rounds
                )
            });
            let mut alone = Watcher::default();
            load(contender, way, &recording, &mut alone);
            speed.alone_rounds.push(per_second(blocks, alone.seconds));
            let mut read = Watcher {
                prompts: contender.serves_readers().then_some(early),
                ..Watcher::default()
            };
            let index = load(contender, way, &recording, &mut read);
            let wrong = wrong(index.as_ref(), &prompts, &hashes, &oracle.expected);
            speed.wrong += wrong;
            check(contender, wrong, data.name())?;
            if read.prompts.is_some() {
                let queries = read.queries;
                speed.read_rounds.push(per_second(blocks, read.seconds));
                if way == Way::Direct {
                    let processor = per_second(blocks, read.processor_seconds);
                    speed.processor_rounds.push(processor);
                }
                speed.queries_rounds.push(per_second(queries, read.seconds));
                speed.p50_rounds.push(percentile(&mut read.latencies, 50));
                speed.p99_rounds.push(percentile(&mut read.latencies, 99));
            }
        }
    }
    for speed in &mut speeds {
        speed.alone = Spread::of(&speed.alone_rounds);
        speed.read = speed.contender.serves_readers().then(|| Read {
            blocks: Spread::of(&speed.read_rounds),
            of_processor: (speed.way == Way::Direct).then(|| Spread::of(&speed.processor_rounds)),
            queries: Spread::of(&speed.queries_rounds),
            p50: Spread::of(&speed.p50_rounds),
            p99: Spread::of(&speed.p99_rounds),
        });
    }
    Ok(Row {
        name: data.name(),
        events,
        blocks,
        ratio: ratio(&speeds, |speed| &speed.read_rounds, f64::max, 1.5),
        processor_ratio: ratio(&speeds, |speed| &speed.processor_rounds, f64::max, 1.5),
        p99_ratio: ratio(&speeds, |speed| &speed.p99_rounds, f64::min, 1.0),
        speeds,
    })
}

fn ratio(
    speeds: &[Speed],
    of: impl Fn(&Speed) -> &Vec<f64>,
    better: impl Fn(f64, f64) -> f64,
    goal: f64,
) -> Option<Ratio> {
    let ours = speeds
        .iter()
        .find(|speed| speed.contender == Contender::Kvdelta)?;
    let median = |speed: &Speed| Spread::of(of(speed)).median;
    // An index with wrong answers is no measure.
    let best = speeds
        .iter()
        .filter(|speed| speed.contender != Contender::Kvdelta)
        .filter(|speed| !median(speed).is_nan() && speed.wrong == 0)
        .reduce(|best, speed| {
            let (old, new) = (median(best), median(speed));
            if better(old, new) == old { best } else { speed }
        })?;
    Some(Ratio {
        peer: best.contender,
        way: best.way,
        ratio: Spread::of_ratios(of(ours), of(best)),
        goal,
    })
}

impl Speed {
    fn new(contender: Contender, way: Way) -> Self {
        Self {
            contender,
            way,
            alone: Spread::default(),
            read: None,
            wrong: 0,
            alone_rounds: Vec::new(),
            read_rounds: Vec::new(),
            processor_rounds: Vec::new(),
            p50_rounds: Vec::new(),
            p99_rounds: Vec::new(),
            queries_rounds: Vec::new(),
        }
    }
}

fn per_second(count: usize, seconds: f64) -> f64 {
    let count = u32::try_from(count).map_or(f64::INFINITY, f64::from);
    count / seconds
}

/// Times a load, with a reader if there are prompts for it.
#[derive(Default)]
struct Watcher<'a> {
    prompts: Option<&'a [Vec<BlockHash>]>,
    seconds: f64,
    processor_seconds: f64,
    queries: usize,
    /// Of the second half of the time, when what the reader asks for is in.
    latencies: Vec<u32>,
}

impl Watch for Watcher<'_> {
    fn watch<R: Reader + Sync>(&mut self, reader: &R, write: impl FnOnce()) {
        let Some(prompts) = self.prompts else {
            return self.watch_alone(write);
        };
        let (reads, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let mut latencies = Vec::with_capacity(LATENCIES);
                for prompt in prompts.iter().cycle() {
                    let mut input = reader.input(prompt);
                    let start = Instant::now();
                    let found = reader.find(black_box(&mut input));
                    let spent = start.elapsed();
                    black_box(found);
                    reads.store(true, Ordering::Release);
                    if is_over.load(Ordering::Acquire) {
                        break;
                    }
                    let spent = u32::try_from(spent.as_nanos()).unwrap_or(u32::MAX);
                    latencies.push((start, spent));
                }
                latencies
            });
            while !reads.load(Ordering::Acquire) {
                thread::yield_now();
            }
            let began = Instant::now();
            self.watch_alone(write);
            is_over.store(true, Ordering::Release);
            let half = began + Duration::from_secs_f64(self.seconds / 2.0);
            let latencies = reading.join().expect("the reader does not panic");
            let during = latencies.iter().filter(|(start, _)| *start >= began);
            self.queries = during.count();
            let late = latencies.iter().filter(|(start, _)| *start >= half);
            self.latencies = late.map(|(_, spent)| *spent).collect();
        });
    }

    fn watch_alone(&mut self, write: impl FnOnce()) {
        let (start, start_of_processor) = (Instant::now(), ThreadTime::now());
        write();
        self.seconds = start.elapsed().as_secs_f64();
        self.processor_seconds = start_of_processor.elapsed().as_secs_f64();
    }
}
