// SPDX-License-Identifier: Apache-2.0

//! From tokens to a claim, beside hashing alone and beside Dynamo's `KvRouter::get_overlap_scores`.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use dynamo_kv_router::indexer::{
    LowerTierIndexers, LowerTierQueryOptions, TieredMatchDetails, query_lower_tiers_with_options,
};
use dynamo_kv_router::protocols::WorkerWithDpRank;
use dynamo_kv_router::scheduling::overlap::{OverlapAnalysis, OverlapScoresResponse};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, KvRouterConfig};
use kvdelta_indexer::{Among, FoundAmong, Index, Millis, Prompt, PromptOf, TrustBook, WorkerRank};
use kvdelta_overlap::{
    Answer, Asked, BlockCost, Cached, Candidate, Claimable, Fleet, Form, Load, NoChoice,
    PromptShape, Query, Weight, claimable,
};
use serde::Serialize;

use crate::contender::{load_compressed, load_kvdelta, peers_hashes, worker_id, worker_of};
use crate::data::{BLOCK_TOKENS, Block, Data, Recording, WORKERS, diverging, extend, size};
use crate::oracle::{Oracle, Overlaps};
use crate::page::{self, Machine, Page, Table, grouped, heads, micros, ratio_of};
use crate::progress::Progress;
use crate::query::{Depth, LOADS, Unwatched, asked, hashes};
use crate::spread::Spread;

/// Most of the time that hashing the same tokens takes.
pub const OF_HASHING: f64 = 1.3;
/// Most of the time of `get_overlap_scores`.
pub const OF_UPSTREAM: f64 = 0.5;

/// How much is measured.
#[derive(Debug)]
pub struct Plan {
    /// Rounds, in each of which everything has its turn.
    pub rounds: usize,
    /// How long one is asked in one round.
    pub turn: Duration,
    /// Blocks of the prompts, and how many of such prompts there are.
    pub prompts: Vec<(usize, usize)>,
    /// (worker, block) pairs behind them.
    pub background: usize,
}

/// All that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Where and how.
    pub machine: Machine,
    /// By length and depth.
    pub rows: Vec<Row>,
    /// Whether the run is long enough to be held against the goals.
    pub judged: bool,
    /// What was not measured, and why.
    pub left_out: Vec<String>,
}

/// What was measured for one kind of prompt, in nanoseconds a prompt.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Tokens of each.
    pub tokens: usize,
    /// How much of them the best worker holds.
    pub depth: Depth,
    /// Blocks in the claim.
    pub claimed: usize,
    /// Dynamo's hashing of all tokens.
    pub peers_hashing: Spread,
    /// Ours of all tokens.
    pub our_hashing: Spread,
    /// Tokens to the claim of a worker that holds most.
    pub claim: Spread,
    /// Tokens to the choice by load and overlap, and its claim.
    pub choice: Spread,
    /// Dynamo's scores from tokens.
    pub scores: Spread,
    /// Claim by Dynamo's hashing, round by round.
    pub of_peers_hashing: Spread,
    /// Claim by our hashing, round by round.
    pub of_our_hashing: Spread,
    /// Claim by Dynamo's scores, round by round.
    pub of_scores: Spread,
    /// Choice by Dynamo's hashing, round by round.
    pub choice_of_peers_hashing: Spread,
    /// Choice by Dynamo's scores, round by round.
    pub choice_of_scores: Spread,
}

/// What kvdelta asks.
#[derive(Debug)]
struct Ours {
    index: Index,
    book: TrustBook,
}

/// Nobody is silent at this time.
const NOW: Millis = Millis(1);

impl Ours {
    fn load(recording: &Recording) -> Self {
        let book = TrustBook::new(Duration::from_secs(60));
        for worker in 0..WORKERS {
            let of = WorkerRank::new(worker_id(worker), 0);
            book.admit(of, Millis(0));
            book.heard(of, 1, Millis(0));
            book.caught_up(of, Millis(0));
        }
        Self {
            index: load_kvdelta(recording, &mut Unwatched),
            book,
        }
    }

    fn query(&self) -> Query<'_> {
        Query {
            index: &self.index,
            trust: &self.book,
        }
    }

    /// The choice, by a weight so large that it is one of those that hold most, and the claim.
    fn answer(&self, tokens: &[u32], fleet: &mut Fleet) -> Result<Answer, NoChoice> {
        let mut prompt = Prompt::new(tokens, size(), PromptOf::default());
        let asked = Asked {
            shape: shape(tokens),
            busy: None,
            size: None,
            tie_break: 0,
        };
        let cost = BlockCost {
            form: Form::Missing,
            weight: Weight::try_from(1e3).expect("is finite"),
        };
        self.query().choose(&mut prompt, fleet, cost, asked, NOW)
    }

    /// The claim of a worker that holds most of `tokens`.
    fn claim(&self, tokens: &[u32], list: &mut List) -> Option<Claimable> {
        let shape = shape(tokens);
        let mut prompt = Prompt::new(tokens, size(), PromptOf::default());
        let List { ranks, among } = list;
        let of_most = |found: FoundAmong<'_>| {
            let places = found.blocks().iter().enumerate();
            let (place, blocks) = places.max_by_key(|(_, blocks)| **blocks)?;
            let cached = Cached {
                of: *ranks.get(place)?,
                blocks: *blocks,
                last: found.engine(place),
            };
            let standing = self.book.standing(cached.of, NOW);
            claimable(cached, standing, shape).ok()
        };
        prompt.within(shape.most_blocks(), |prompt| {
            self.index.overlaps_among(prompt, among, of_most)
        })
    }

    fn overlaps(&self, tokens: &[u32], fleet: &mut Fleet) -> Overlaps {
        let mut prompt = Prompt::new(tokens, size(), PromptOf::default());
        self.query().overlaps(&mut prompt, shape(tokens), fleet);
        let held = fleet.candidates().iter();
        held.filter(|candidate| candidate.cached_blocks > 0)
            .map(|candidate| (worker_of(candidate.of.worker.0), candidate.cached_blocks))
            .collect()
    }
}

/// All workers, to ask what they hold.
struct List {
    ranks: Vec<WorkerRank>,
    among: Among,
}

impl List {
    fn new() -> Self {
        let ranks = (0..WORKERS).map(|worker| WorkerRank::new(worker_id(worker), 0));
        let mut list = Self {
            ranks: ranks.collect(),
            among: Among::default(),
        };
        for of in &list.ranks {
            list.among.put(*of);
        }
        list
    }
}

/// All workers, each with a load of its own.
fn fleet() -> Fleet {
    let candidates = (0..WORKERS).map(|worker| {
        let of = WorkerRank::new(worker_id(worker), 0);
        // 37 and 64 have no common divisor, so no order of the loads is that of the workers.
        Candidate::new(of).with_load(Load::new(1_000 + worker * 37 % WORKERS))
    });
    Fleet::new(candidates)
}

fn shape(tokens: &[u32]) -> PromptShape {
    PromptShape {
        prompt_tokens: tokens.len(),
        block_size: size(),
        drops_last_block: false,
    }
}

/// What `KvRouter::get_overlap_scores` of dynamo-llm runs, of its public parts: hashing, what
/// `Indexer::find_matches_by_tier` does of its default index (several event threads, no side index),
/// and the response. Its lock on the workers' configurations is left out.
#[derive(Debug)]
struct Upstream {
    tree: Tree,
    lower: LowerTiers,
    config: KvRouterConfig,
    /// First rank and number of ranks.
    workers: HashMap<u64, (u32, u32)>,
}

/// Has no `Debug` upstream.
struct Tree(ConcurrentRadixTreeCompressed);
/// Has no `Debug` upstream.
struct LowerTiers(LowerTierIndexers);

impl std::fmt::Debug for Tree {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("ConcurrentRadixTreeCompressed")
    }
}

impl std::fmt::Debug for LowerTiers {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("LowerTierIndexers")
    }
}

impl Upstream {
    fn load(recording: &Recording) -> Self {
        let workers = (0..WORKERS).map(|worker| (worker_id(worker), (0, 1)));
        Self {
            tree: Tree(load_compressed(recording, &mut Unwatched)),
            lower: LowerTiers(LowerTierIndexers::new(4, BLOCK_TOKENS)),
            config: KvRouterConfig::default(),
            workers: workers.collect(),
        }
    }

    fn scores(&self, tokens: &[u32]) -> OverlapScoresResponse {
        let hashes = peers_hashes(tokens);
        let options = LowerTierQueryOptions::default();
        let tree = &self.tree.0;
        let device = tree.find_match_details_impl_with_options(&hashes, false, false);
        let lower_tier = query_lower_tiers_with_options(&self.lower.0, &hashes, &device, options);
        let tiered = TieredMatchDetails { device, lower_tier };
        let workers = self.workers.iter().flat_map(|(id, (first, ranks))| {
            (*first..first + ranks).map(|rank| WorkerWithDpRank::new(*id, rank))
        });
        let workers: Vec<_> = workers.collect();
        OverlapAnalysis::new(&self.config, BLOCK_TOKENS, &tiered).scores_response(
            hashes.len(),
            workers,
            false,
            None,
            None,
        )
    }
}

/// Prompts of one length and depth, and the rounds so far.
#[derive(Debug)]
struct Case {
    depth: Depth,
    prompts: Vec<Vec<u32>>,
    expected: Vec<Overlaps>,
    peers_hashing: Vec<f64>,
    our_hashing: Vec<f64>,
    claim: Vec<f64>,
    choice: Vec<f64>,
    scores: Vec<f64>,
}

/// Measures all of the plan.
pub fn run(plan: &Plan, progress: &mut Progress) -> Result<Vec<Row>> {
    let mut data = vec![Data::Tree {
        entries: plan.background,
    }];
    let prompts = plan.prompts.iter();
    data.extend(prompts.map(|&(blocks, prompts)| Data::Prompts { blocks, prompts }));
    let recording = Recording::of(&data);
    let mut cases = cases(&plan.prompts);
    for case in &mut cases {
        progress.say(|| "what is right is looked up".to_owned());
        case.expected = Oracle::of(&case.prompts, |sink| recording.steps(sink)).expected;
    }
    for load in 0..LOADS {
        progress.say(|| "the indexes are loaded".to_owned());
        let (ours, upstream) = if load % 2 == 0 {
            let ours = Ours::load(&recording);
            (ours, Upstream::load(&recording))
        } else {
            let upstream = Upstream::load(&recording);
            (Ours::load(&recording), upstream)
        };
        for case in &mut cases {
            case.check(&ours, &upstream)?;
            for round in 0..plan.rounds.div_ceil(LOADS) {
                progress.say(|| case.said());
                case.round(plan.turn, round, &ours, &upstream);
            }
        }
    }
    Ok(cases.into_iter().map(Case::row).collect())
}

fn cases(prompts: &[(usize, usize)]) -> Vec<Case> {
    let each = prompts.iter().flat_map(|&(blocks, prompts)| {
        let held = Data::Prompts { blocks, prompts }.prompts(usize::MAX);
        let depths = [
            (Depth::None, 0),
            (Depth::Half, blocks / 2),
            (Depth::Full, blocks),
        ];
        depths.map(|(depth, kept)| Case {
            depth,
            prompts: held.iter().map(|prompt| diverging(prompt, kept)).collect(),
            expected: Vec::new(),
            peers_hashing: Vec::new(),
            our_hashing: Vec::new(),
            claim: Vec::new(),
            choice: Vec::new(),
            scores: Vec::new(),
        })
    });
    each.collect()
}

impl Case {
    fn said(&self) -> String {
        format!("{} tokens, {}", self.tokens(), self.depth.name())
    }

    fn tokens(&self) -> usize {
        self.prompts.first().map_or(0, Vec::len)
    }

    /// Every answer is the oracle's, and the claim is of a worker that holds most.
    fn check(&self, ours: &Ours, upstream: &Upstream) -> Result<()> {
        let (mut fleet, mut list) = (fleet(), List::new());
        for (prompt, expected) in self.prompts.iter().zip(&self.expected) {
            let scores = upstream.scores(prompt).workers;
            ensure!(scores.len() == WORKERS, "get_overlap_scores: {scores:?}");
            let scores = scores.iter().filter(|score| score.device_blocks > 0);
            let scores: Overlaps = scores
                .map(|score| (worker_of(score.worker_id), score.device_blocks))
                .collect();
            let differs = "from the oracle's";
            ensure!(
                scores == *expected,
                "{}: get_overlap_scores differs {differs}: {scores:?}, {expected:?}",
                self.said()
            );
            let most = shape(prompt).most_blocks();
            let bounded = expected.iter();
            let bounded: Overlaps = bounded
                .map(|(worker, blocks)| (*worker, (*blocks).min(most)))
                .collect();
            let found = ours.overlaps(prompt, &mut fleet);
            ensure!(
                found == bounded,
                "{}: kvdelta's overlaps differ {differs}: {found:?}, {bounded:?}",
                self.said()
            );
            let answer = ours.answer(prompt, &mut fleet)?;
            for claim in [ours.claim(prompt, &mut list), answer.claim.ok()] {
                ensure!(
                    is_best(prompt, &bounded, claim),
                    "{}: {claim:?} is no claim of the best of {bounded:?}",
                    self.said()
                );
            }
        }
        Ok(())
    }

    fn round(&mut self, turn: Duration, round: usize, ours: &Ours, upstream: &Upstream) {
        let prompts = &self.prompts;
        let (mut fleet, mut list) = (fleet(), List::new());
        for place in 0..5 {
            match (round + place) % 5 {
                0 => self.peers_hashing.push(asked(turn, prompts, peers_hashes)),
                1 => self.our_hashing.push(asked(turn, prompts, hashes)),
                2 => {
                    let claim = |prompt: &[u32]| ours.claim(prompt, &mut list);
                    self.claim.push(asked(turn, prompts, claim));
                }
                3 => {
                    let answer = |prompt: &[u32]| ours.answer(prompt, &mut fleet);
                    self.choice.push(asked(turn, prompts, answer));
                }
                _ => self
                    .scores
                    .push(asked(turn, prompts, |p| upstream.scores(p))),
            }
        }
    }

    fn row(self) -> Row {
        let best = self.expected.first();
        let best = best.and_then(|overlaps| overlaps.values().max()).copied();
        let prompt = self.prompts.first().map_or(&[][..], Vec::as_slice);
        Row {
            tokens: prompt.len(),
            depth: self.depth,
            claimed: best.unwrap_or(0).min(shape(prompt).most_blocks()),
            peers_hashing: Spread::of(&self.peers_hashing),
            our_hashing: Spread::of(&self.our_hashing),
            claim: Spread::of(&self.claim),
            choice: Spread::of(&self.choice),
            scores: Spread::of(&self.scores),
            of_peers_hashing: Spread::of_ratios(&self.claim, &self.peers_hashing),
            of_our_hashing: Spread::of_ratios(&self.claim, &self.our_hashing),
            of_scores: Spread::of_ratios(&self.claim, &self.scores),
            choice_of_peers_hashing: Spread::of_ratios(&self.choice, &self.peers_hashing),
            choice_of_scores: Spread::of_ratios(&self.choice, &self.scores),
        }
    }
}

/// Whether the claim says what one of those holds who hold most, and nothing where nobody holds any.
fn is_best(prompt: &[u32], overlaps: &Overlaps, claim: Option<Claimable>) -> bool {
    let most = overlaps.values().max();
    let (Some(most), Some(claim)) = (most, claim) else {
        return most.is_none() && claim.is_none();
    };
    let mut chain: Vec<Block> = Vec::new();
    extend(&mut chain, prompt);
    let last = most.checked_sub(1).and_then(|last| chain.get(last));
    claim.blocks == *most
        && overlaps.get(&worker_of(claim.of.worker.0)) == Some(most)
        && last.is_some_and(|last| last.sequence.0 == claim.prefix_hash.0)
}

impl Report {
    /// The table with all that stands around it.
    pub fn page(&self) -> Page<'_> {
        Page {
            command: "bench query",
            machine: &self.machine,
            tables: vec![self.times(), self.ratios()],
            left_out: &self.left_out,
        }
    }

    fn times(&self) -> Table {
        let rows = self.rows.iter().map(|row| {
            vec![
                grouped(row.tokens),
                row.depth.name().to_owned(),
                grouped(row.claimed),
                micros(row.peers_hashing),
                micros(row.our_hashing),
                micros(row.claim),
                micros(row.choice),
                micros(row.scores),
            ]
        });
        Table {
            title: "Tokens to a claim, 64 workers, microseconds",
            note: "*Hashing* is that of the whole prompt alone. *Claim*, *choice* and *scores* begin with \
                   the tokens too.",
            head: heads(&[
                "tokens",
                "cached",
                "claimed blocks",
                "hashing: Dynamo's",
                "ours",
                "claim",
                "choice",
                "scores",
            ]),
            rows: rows.collect(),
        }
    }

    fn ratios(&self) -> Table {
        let rows = self.rows.iter().map(|row| {
            let verdict = |ratio: Spread, goal| page::at_most(ratio.median, goal, self.judged);
            vec![
                grouped(row.tokens),
                row.depth.name().to_owned(),
                ratio_of(row.of_peers_hashing),
                verdict(row.of_peers_hashing, OF_HASHING),
                ratio_of(row.of_our_hashing),
                ratio_of(row.of_scores),
                verdict(row.of_scores, OF_UPSTREAM),
                ratio_of(row.choice_of_peers_hashing),
                ratio_of(row.choice_of_scores),
            ]
        });
        Table {
            title: "The same as ratios",
            note: "Of *claim* to Dynamo's hashing, to ours and to *scores*, then of *choice*; each taken in \
                   one round.",
            head: heads(&[
                "tokens",
                "cached",
                "claim: to Dynamo's hashing",
                "goal",
                "to our hashing",
                "to scores",
                "goal",
                "choice: to Dynamo's hashing",
                "to scores",
            ]),
            rows: rows.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_is_the_oracles() {
        let plan = Plan {
            rounds: 1,
            turn: Duration::ZERO,
            prompts: vec![(64, 3)],
            background: 20_000,
        };
        let rows = run(&plan, &mut Progress::default()).unwrap();
        let claimed: Vec<_> = rows.iter().map(|row| row.claimed).collect();
        assert_eq!(claimed, [0, 32, 63]);
    }

    #[test]
    fn a_claim_of_another_than_the_best_is_found() {
        let prompt = Data::Prompts {
            blocks: 4,
            prompts: 1,
        }
        .prompts(1)
        .remove(0);
        let mut chain: Vec<Block> = Vec::new();
        extend(&mut chain, &prompt);
        let overlaps = Overlaps::from([(3, 2), (5, 3)]);
        let claim = |worker, blocks: usize| Claimable {
            of: WorkerRank::new(worker_id(worker), 0),
            blocks,
            prefix_hash: kvdelta_indexer::EngineHash(chain[blocks - 1].sequence.0),
        };
        assert!(is_best(&prompt, &overlaps, Some(claim(5, 3))));
        assert!(!is_best(&prompt, &overlaps, Some(claim(3, 2))));
        assert!(!is_best(&prompt, &overlaps, Some(claim(3, 3))));
        assert!(!is_best(&prompt, &overlaps, None));
        assert!(!is_best(&prompt, &Overlaps::new(), Some(claim(5, 3))));
        let mut other = claim(5, 3);
        other.prefix_hash.0 += 1;
        assert!(!is_best(&prompt, &overlaps, Some(other)));
    }
}
