// SPDX-License-Identifier: Apache-2.0

//! How long a query takes: from tokens, from hashes, and what hashing alone takes.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kvdelta_indexer::{BlockHash, PromptOf, block_hashes};
use serde::Serialize;

use crate::contender::{Contender, Found, Reader, Watch, load, peers_hashes};
use crate::data::{Data, Recording, diverging, size};
use crate::oracle::{Oracle, Overlaps};
use crate::progress::Progress;
use crate::spread::Spread;

/// How deep the deepest match of a prompt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Depth {
    /// No block.
    None,
    /// Half of the blocks.
    Half,
    /// All blocks.
    Full,
    /// As the data has it.
    Mixed,
}

impl Depth {
    /// Most of the fastest peer's time from tokens to overlaps.
    pub fn goal(self) -> Option<f64> {
        match self {
            Self::None => Some(0.1),
            Self::Half => Some(0.6),
            Self::Full => Some(0.8),
            Self::Mixed => None,
        }
    }

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Half => "half",
            Self::Full => "full",
            Self::Mixed => "as is",
        }
    }
}

/// Prompts that are asked alike, and the rounds so far.
#[derive(Debug)]
struct Case {
    name: String,
    depth: Depth,
    prompts: Vec<Vec<u32>>,
    expected: Vec<Overlaps>,
    peers_hashing: Vec<f64>,
    our_hashing: Vec<f64>,
    times: BTreeMap<Contender, Times>,
}

/// One index's times, in nanoseconds a query.
#[derive(Debug, Default, Serialize)]
pub struct Times {
    /// Tokens to overlaps.
    pub query: Spread,
    /// Hashes to overlaps.
    pub matching: Spread,
    /// Answers that differ from the oracle's, of one for each prompt and load.
    pub wrong: usize,
    #[serde(skip)]
    query_rounds: Vec<f64>,
    #[serde(skip)]
    matching_rounds: Vec<f64>,
}

/// What was measured for one kind of prompt.
#[derive(Debug, Serialize)]
pub struct Row {
    /// What the prompts are of.
    pub name: String,
    /// How deep they match.
    pub depth: Depth,
    /// How many there are.
    pub prompts: usize,
    /// Their mean length.
    pub mean_tokens: usize,
    /// The peers' hashing of the whole prompt, in nanoseconds.
    pub peers_hashing: Spread,
    /// Ours of the whole prompt, in nanoseconds.
    pub our_hashing: Spread,
    /// By index.
    pub times: BTreeMap<Contender, Times>,
    /// Ours as part of the fastest peer's, tokens to overlaps.
    pub query_ratio: Option<Ratio>,
    /// Ours as part of the fastest peer's, hashes to overlaps.
    pub matching_ratio: Option<Ratio>,
}

/// Ours beside the best peer's.
#[derive(Debug, Serialize)]
pub struct Ratio {
    /// The peer with the best median.
    pub peer: Contender,
    /// Ours by the peer's, round by round.
    pub ratio: Spread,
    /// What is aimed at.
    pub goal: Option<f64>,
}

/// What to measure.
#[derive(Debug)]
pub struct Plan {
    /// The indexes.
    pub contenders: Vec<Contender>,
    /// Rounds, in each of which every index has its turn.
    pub rounds: usize,
    /// How long one index is asked in one round.
    pub turn: Duration,
    /// What each set of indexes holds.
    pub loads: Vec<Vec<Data>>,
}

/// Asks for every prompt of the plan.
pub fn run(plan: &Plan, progress: &mut Progress) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for data in &plan.loads {
        rows.extend(run_load(plan, data, progress)?);
    }
    Ok(rows)
}

fn cases(data: &[Data]) -> Vec<Case> {
    let mut cases = Vec::new();
    for data in data {
        match data {
            Data::Prompts { blocks, .. } => {
                let held = data.prompts(usize::MAX);
                for (depth, kept) in [
                    (Depth::None, 0),
                    (Depth::Half, blocks / 2),
                    (Depth::Full, *blocks),
                ] {
                    let prompts = held.iter().map(|prompt| diverging(prompt, kept));
                    cases.push(Case::new(data, depth, prompts.collect()));
                }
            }
            _ => cases.push(Case::new(data, Depth::Mixed, data.prompts(32))),
        }
    }
    cases
}

/// How often the indexes are loaded, in changing order: where one happens to lie in memory counts too.
pub(crate) const LOADS: usize = 3;

fn run_load(plan: &Plan, data: &[Data], progress: &mut Progress) -> Result<Vec<Row>> {
    let names: Vec<_> = data.iter().map(Data::name).collect();
    let names = names.join(" and ");
    let recording = Recording::of(data);
    let mut cases = cases(data);
    for case in &mut cases {
        progress.say(|| format!("query: what is right about {names} is looked up"));
        case.expected = Oracle::of(&case.prompts, |sink| recording.steps(sink)).expected;
    }
    for turn in 0..LOADS {
        let mut loaded = Vec::new();
        for place in 0..plan.contenders.len() {
            let contender = plan.contenders[(turn + place) % plan.contenders.len()];
            progress.say(|| format!("query: {contender} is loaded with {names}"));
            let way = contender.ways()[0];
            let index = load(contender, way, &recording, &mut Unwatched);
            loaded.push((contender, index));
        }
        for case in &mut cases {
            run_case(plan, case, &loaded, progress)?;
        }
    }
    Ok(cases.into_iter().map(Case::row).collect())
}

fn run_case(
    plan: &Plan,
    case: &mut Case,
    loaded: &[(Contender, Box<dyn Reader>)],
    progress: &mut Progress,
) -> Result<()> {
    let hashes: Vec<Vec<BlockHash>> = case.prompts.iter().map(|p| hashes(p)).collect();
    for (contender, index) in loaded {
        let wrong = wrong(index.as_ref(), &case.prompts, &hashes, &case.expected);
        check(*contender, wrong, &case.name)?;
        case.times.entry(*contender).or_default().wrong += wrong;
    }
    for round in 0..plan.rounds.div_ceil(LOADS) {
        progress.say(|| format!("query: {} {}", case.name, case.depth.name()));
        let asked_hashing = asked(plan.turn, &case.prompts, peers_hashes);
        case.peers_hashing.push(asked_hashing);
        let asked_hashing = asked(plan.turn, &case.prompts, self::hashes);
        case.our_hashing.push(asked_hashing);
        for turn in 0..loaded.len() {
            let (contender, index) = &loaded[(turn + round) % loaded.len()];
            let query = asked(plan.turn, &case.prompts, |p| index.find_tokens(p));
            let matching = matched(plan.turn, index.as_ref(), &hashes);
            let times = case.times.entry(*contender).or_default();
            times.query_rounds.push(query);
            times.matching_rounds.push(matching);
        }
    }
    Ok(())
}

impl Case {
    fn new(data: &Data, depth: Depth, prompts: Vec<Vec<u32>>) -> Self {
        Self {
            name: data.name().to_owned(),
            depth,
            prompts,
            expected: Vec::new(),
            peers_hashing: Vec::new(),
            our_hashing: Vec::new(),
            times: BTreeMap::new(),
        }
    }

    fn row(mut self) -> Row {
        for times in self.times.values_mut() {
            times.query = Spread::of(&times.query_rounds);
            times.matching = Spread::of(&times.matching_rounds);
        }
        let tokens: usize = self.prompts.iter().map(Vec::len).sum();
        let goal = self.depth.goal();
        Row {
            name: self.name,
            depth: self.depth,
            prompts: self.prompts.len(),
            mean_tokens: tokens / self.prompts.len().max(1),
            peers_hashing: Spread::of(&self.peers_hashing),
            our_hashing: Spread::of(&self.our_hashing),
            query_ratio: ratio(&self.times, |times| &times.query_rounds, goal),
            matching_ratio: ratio(
                &self.times,
                |times| &times.matching_rounds,
                goal.map(|_| 1.0),
            ),
            times: self.times,
        }
    }
}

fn ratio(
    times: &BTreeMap<Contender, Times>,
    of: impl Fn(&Times) -> &Vec<f64>,
    goal: Option<f64>,
) -> Option<Ratio> {
    let ours = times.get(&Contender::Kvdelta)?;
    let median = |times: &Times| Spread::of(of(times)).median;
    // An index with wrong answers is no measure.
    let peers = times
        .iter()
        .filter(|(contender, times)| **contender != Contender::Kvdelta && times.wrong == 0);
    let (peer, theirs) = peers.min_by(|a, b| median(a.1).total_cmp(&median(b.1)))?;
    Some(Ratio {
        peer: *peer,
        ratio: Spread::of_ratios(of(ours), of(theirs)),
        goal,
    })
}

/// The hashes of a whole prompt, by ours.
pub fn hashes(prompt: &[u32]) -> Vec<BlockHash> {
    block_hashes(prompt, size(), PromptOf::default())
}

/// Answers of `index` that are not the expected ones, each asked in both ways.
pub fn wrong(
    index: &dyn Reader,
    prompts: &[Vec<u32>],
    hashes: &[Vec<BlockHash>],
    expected: &[Overlaps],
) -> usize {
    let answers = prompts.iter().zip(hashes).zip(expected);
    let wrong = answers.filter(|((prompt, hashes), expected)| {
        let from_tokens = index.find_tokens(prompt);
        let from_hashes = index.find(&mut index.input(hashes));
        from_tokens.overlaps() != **expected || from_hashes.overlaps() != **expected
    });
    wrong.count()
}

/// Wrong answers of ours are an error, those of peers a remark.
pub fn check(contender: Contender, wrong: usize, data: &str) -> Result<()> {
    if wrong > 0 {
        ensure!(
            contender != Contender::Kvdelta,
            "kvdelta: {wrong} answers about {data} differ from the oracle's"
        );
        eprintln!("{contender}: {wrong} answers about {data} differ from the oracle's");
    }
    Ok(())
}

/// Nanoseconds of `ask` for one prompt, all of them asked in turn for at least `turn`.
///
/// The median of the passes, so that one in which another program had the processor does not count.
pub(crate) fn asked<T>(
    turn: Duration,
    prompts: &[Vec<u32>],
    mut ask: impl FnMut(&[u32]) -> T,
) -> f64 {
    let began = Instant::now();
    let mut passes = Vec::new();
    while passes.is_empty() || began.elapsed() < turn {
        let start = Instant::now();
        for prompt in prompts {
            black_box(ask(black_box(prompt)));
        }
        passes.push(nanoseconds(start.elapsed(), prompts.len()));
    }
    Spread::of(&passes).median
}

/// As `asked`, from hashes; the copies that an index may use up are made outside of the time.
fn matched(turn: Duration, index: &dyn Reader, hashes: &[Vec<BlockHash>]) -> f64 {
    let began = Instant::now();
    let mut passes = Vec::new();
    while passes.is_empty() || began.elapsed() < turn {
        let mut inputs: Vec<_> = hashes.iter().map(|hashes| index.input(hashes)).collect();
        let start = Instant::now();
        for input in &mut inputs {
            let found: Found = index.find(black_box(input));
            black_box(found);
        }
        passes.push(nanoseconds(start.elapsed(), inputs.len()));
    }
    Spread::of(&passes).median
}

/// Nanoseconds a piece.
fn nanoseconds(spent: Duration, pieces: usize) -> f64 {
    let pieces = u32::try_from(pieces).map_or(f64::INFINITY, f64::from);
    spent.as_secs_f64() * 1e9 / pieces
}

/// Loading that nobody looks at.
#[derive(Debug)]
pub(crate) struct Unwatched;

impl Watch for Unwatched {
    fn watch<R: Reader + Sync>(&mut self, _: &R, write: impl FnOnce()) {
        write();
    }

    fn watch_alone(&mut self, write: impl FnOnce()) {
        write();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_answers_fail_the_run_if_they_are_ours() {
        let error = check(Contender::Kvdelta, 3, "tree").unwrap_err();
        assert!(error.to_string().contains("3 answers about tree"));
        assert!(check(Contender::Kvdelta, 0, "tree").is_ok());
        assert!(check(Contender::Strided, 3, "tree").is_ok());
    }

    #[test]
    fn an_index_with_wrong_answers_is_no_measure() {
        let times = |median: f64, wrong| Times {
            wrong,
            query_rounds: vec![median],
            ..Times::default()
        };
        let all = BTreeMap::from([
            (Contender::Kvdelta, times(2.0, 0)),
            (Contender::Compressed, times(4.0, 0)),
            (Contender::Strided, times(1.0, 7)),
        ]);
        let ratio = ratio(&all, |times| &times.query_rounds, Some(0.6)).unwrap();
        assert_eq!(
            (ratio.peer, ratio.ratio.median),
            (Contender::Compressed, 0.5)
        );
    }
}
