use std::time::Duration;

use kvdelta_indexer::{
    BlockHash, BlockSize, Change, Copies, EngineHash, Event, Index, Millis, Prompt, PromptOf,
    Reason, Stored, StoredBlock, Tier, TrustBook, WorkerRank, block_hashes,
};
use proptest::prelude::*;

use super::{Answer, Fleet, Query};
use crate::candidate::{Candidate, Load, Refusal};
use crate::choose::{Asked, NoChoice};
use crate::claimable::{NoClaim, PromptShape};
use crate::cost::{BlockCost, Form, Weight};
use crate::sizes::Place;

const NOW: Millis = Millis(0);

fn cost() -> BlockCost {
    BlockCost {
        form: Form::Missing,
        weight: Weight::try_from(1.0).unwrap(),
    }
}

fn rank(worker: u64) -> WorkerRank {
    WorkerRank::new(worker, 0)
}

fn size(tokens: u32) -> BlockSize {
    BlockSize::try_from(tokens).unwrap()
}

/// Names of blocks differ between tiers and ranks, as those of engines may.
fn name(of: WorkerRank, block: BlockHash, at: usize) -> EngineHash {
    let worker = of.worker.0 << 8 | u64::from(of.rank.0);
    EngineHash(block.0.rotate_left(7) ^ worker << 32 ^ at as u64)
}

struct Fixture {
    index: Index,
    trust: TrustBook,
    eagle: bool,
}

impl Fixture {
    fn new(block_size: u32, eagle: bool) -> Self {
        Self {
            index: Index::new(size(block_size)),
            trust: TrustBook::new(Duration::from_secs(3600)),
            eagle,
        }
    }

    fn admit(&self, of: WorkerRank) {
        self.index.admit(of);
        self.trust.admit(of, NOW);
        self.trust.heard(of, 0, NOW);
        self.trust.caught_up(of, NOW);
    }

    fn of(&self) -> PromptOf<'static> {
        PromptOf {
            eagle: self.eagle,
            ..PromptOf::default()
        }
    }

    fn shape(&self, tokens: &[u32]) -> PromptShape {
        PromptShape {
            prompt_tokens: tokens.len(),
            block_size: self.index.block_size(),
            drops_last_block: self.eagle,
        }
    }

    /// `of` stores the first `blocks` blocks of `tokens`.
    fn store(&self, of: WorkerRank, tier: Tier, tokens: &[u32], blocks: usize) {
        self.admit(of);
        let hashes = block_hashes(tokens, self.index.block_size(), self.of());
        let blocks = hashes.iter().take(blocks).enumerate();
        let blocks = blocks.map(|(at, block)| StoredBlock {
            block: *block,
            engine: name(of, *block, at),
        });
        let stored = Stored {
            tier,
            parent: None,
            namespace: None,
            blocks: blocks.collect(),
            copies: Copies::Single,
            source: None,
        };
        let change = Change::Stored(stored);
        self.index.apply(&Event { of, change });
    }

    fn ask(&self, tokens: &[u32], fleet: &mut Fleet) -> Result<Answer, NoChoice> {
        let query = Query {
            index: &self.index,
            trust: &self.trust,
        };
        let mut prompt = Prompt::new(tokens, self.index.block_size(), self.of());
        let asked = Asked {
            shape: self.shape(tokens),
            busy: None,
            size: None,
            tie_break: 5,
        };
        query.choose(&mut prompt, fleet, cost(), asked, NOW)
    }

    /// What is claimed of rank 1, the only candidate, after it stored the first `held` blocks.
    fn claim(block_size: u32, eagle: bool, prompt: usize, held: usize) -> Result<usize, NoClaim> {
        let tokens: Vec<_> = (1..=100).collect();
        let fixture = Self::new(block_size, eagle);
        fixture.store(rank(1), Tier::Device, &tokens, held);
        let mut fleet = Fleet::new([Candidate::new(rank(1))]);
        let tokens = &tokens[..prompt];
        let answer = fixture.ask(tokens, &mut fleet).unwrap();
        let claim = answer.claim?;
        let hashes = block_hashes(tokens, fixture.index.block_size(), fixture.of());
        let last = claim.blocks - 1;
        assert_eq!(claim.prefix_hash, name(rank(1), hashes[last], last));
        Ok(claim.blocks)
    }
}

#[test]
fn places_are_in_the_order_of_the_ranks_whatever_comes_and_goes() {
    let candidate = |worker| Candidate::new(rank(worker)).with_load(Load::new(1));
    let mut fleet = Fleet::new([5, 9, 2].map(candidate));
    let places = |fleet: &Fleet| {
        let mut all: Vec<_> = fleet.candidates().iter().collect();
        all.sort_by_key(|one| one.of);
        all.iter().map(|one| one.place).collect::<Vec<_>>()
    };
    let middles = |parts| {
        (0..parts)
            .map(|at| Place::middle(at, parts))
            .collect::<Vec<_>>()
    };
    assert_eq!(places(&fleet), middles(3));
    fleet.put(candidate(7));
    assert_eq!(places(&fleet), middles(4));
    fleet.put(candidate(7));
    assert_eq!(places(&fleet), middles(4), "it was there");
    assert!(fleet.remove(rank(2)) && !fleet.remove(rank(2)));
    assert_eq!(places(&fleet), middles(3));
}

/// B20: at least one token is left to compute, so the block that holds the last one is not skipped.
#[test]
fn b20_the_block_of_the_last_token_is_never_claimed() {
    let nothing = Err(NoClaim::NothingCached(rank(1)));
    // Block size, EAGLE, tokens of the prompt, blocks held, what is claimed.
    let table = [
        (4, false, 8, 2, Ok(1)),
        (4, false, 9, 2, Ok(2)),
        (4, false, 12, 1, Ok(1)),
        (4, false, 4, 1, nothing),
        (4, false, 5, 1, Ok(1)),
        (4, false, 0, 2, nothing),
        (4, false, 1, 2, nothing),
        (1, false, 1, 50, nothing),
        (1, false, 2, 50, Ok(1)),
        (1, false, 40, 50, Ok(39)),
        (1, true, 2, 50, nothing),
        (1, true, 3, 50, Ok(1)),
        (4, true, 8, 20, nothing),
        (4, true, 9, 20, Ok(1)),
        (4, true, 12, 20, Ok(1)),
        (4, true, 13, 20, Ok(2)),
        (4, true, 13, 1, Ok(1)),
        (64, false, 63, 1, nothing),
    ];
    for (block_size, eagle, prompt, held, right) in table {
        let claim = Fixture::claim(block_size, eagle, prompt, held);
        assert_eq!(claim, right, "{block_size} {eagle} {prompt} {held}");
    }
}

/// B14: the overlap is that of the rank, and of its device memory.
#[test]
fn b14_ranks_and_tiers_are_told_apart() {
    let tokens: Vec<_> = (1..=41).collect();
    let fixture = Fixture::new(4, false);
    let ranks = [0, 1, 2].map(|rank| WorkerRank::new(7, rank));
    fixture.store(ranks[1], Tier::Device, &tokens, 6);
    fixture.store(ranks[0], Tier::Device, &tokens, 2);
    fixture.store(ranks[0], Tier::Host, &tokens, 10);
    fixture.store(ranks[2], Tier::Disk, &tokens, 10);
    fixture.store(rank(9), Tier::Device, &tokens, 10);
    let load = Load::new(0);
    let mut fleet = Fleet::new(ranks.map(|of| Candidate::new(of).with_load(load)));
    let answer = fixture.ask(&tokens, &mut fleet).unwrap();
    let cached: Vec<_> = fleet
        .candidates()
        .iter()
        .map(|one| one.cached_blocks)
        .collect();
    assert_eq!(cached, [2, 6, 0]);
    let claim = answer.claim.unwrap();
    assert_eq!((claim.of, claim.blocks), (ranks[1], 6));
    // The answer before is forgotten, also where nothing is found.
    let other: Vec<_> = (1000..1041).collect();
    let answer = fixture.ask(&other, &mut fleet).unwrap();
    assert!(
        fleet
            .candidates()
            .iter()
            .all(|one| one.cached().blocks == 0)
    );
    assert!(fleet.candidates().iter().all(|one| one.last.is_none()));
    assert_eq!(
        answer.claim,
        Err(NoClaim::NothingCached(answer.choice.best.of()))
    );
}

#[test]
fn an_overlap_that_is_not_trusted_counts_in_the_choice_and_not_in_a_claim() {
    let tokens: Vec<_> = (1..=41).collect();
    let fixture = Fixture::new(4, false);
    fixture.store(rank(1), Tier::Device, &tokens, 6);
    let load = Load::new(0);
    let mut fleet = Fleet::new([1, 2].map(|worker| Candidate::new(rank(worker)).with_load(load)));
    fixture.trust.lower(rank(1), Reason::Gap, NOW);
    let answer = fixture.ask(&tokens, &mut fleet).unwrap();
    assert_eq!(
        answer.to_string(),
        "decode on 1/0: 16 = load 11 + 1 x 5 of 11 missing; next 2/0: 22 = load 11 + 1 x 11 of 11 missing; \
         2 allowed, 0 refused; no claim: the events of worker 1/0 are not complete: gap"
    );
    fixture.trust.caught_up(rank(1), NOW);
    let answer = fixture.ask(&tokens, &mut fleet).unwrap();
    assert_eq!(answer.claim.unwrap().blocks, 6);
    assert!(answer.to_string().ends_with("; claim of 6 blocks"));
    fixture.trust.remove(rank(1));
    let claim = fixture.ask(&tokens, &mut fleet).unwrap().claim;
    let of = rank(1);
    assert_eq!(claim, Err(NoClaim::Untrusted { of, reason: None }));
    fleet.candidate_mut(rank(1)).unwrap().refused = Some(Refusal::Unavailable);
    let best = fixture.ask(&tokens, &mut fleet).unwrap().choice.best;
    assert_eq!(best.of(), rank(2));
    assert_eq!(fleet.candidate_mut(rank(3)), None);
}

#[test]
fn a_fleet_has_each_rank_once_and_lets_ranks_go() {
    let mut fleet = Fleet::new([1, 2, 1].map(|worker| Candidate::new(rank(worker))));
    fleet.put(Candidate::new(rank(2)).with_capacity(9));
    fleet.put(Candidate::new(rank(3)));
    assert!(fleet.remove(rank(1)));
    assert!(!fleet.remove(rank(1)));
    let mut left: Vec<_> = fleet.candidates().iter().map(|one| one.of).collect();
    left.sort();
    assert_eq!(left, [rank(2), rank(3)]);
    for of in left {
        let capacity = fleet.candidate_mut(of).unwrap().capacity_blocks;
        assert_eq!(capacity, (of == rank(2)).then_some(9));
    }
}

#[test]
fn a_prompt_is_hashed_no_further_than_it_may_be_claimed_and_stays_whole_for_others() {
    let tokens: Vec<_> = (1..=40).collect();
    let fixture = Fixture::new(4, false);
    fixture.store(rank(1), Tier::Device, &tokens, 10);
    let mut fleet = Fleet::new([Candidate::new(rank(1))]);
    let query = Query {
        index: &fixture.index,
        trust: &fixture.trust,
    };
    let mut prompt = Prompt::new(&tokens, size(4), PromptOf::default());
    query.overlaps(&mut prompt, fixture.shape(&tokens), &mut fleet);
    assert_eq!(fleet.candidates()[0].cached_blocks, 9);
    assert_eq!((prompt.hashed_blocks(), prompt.blocks()), (9, 10));
    let mut cold = Prompt::new(&[7; 4000], size(4), PromptOf::default());
    query.overlaps(&mut cold, fixture.shape(&[7; 4000]), &mut fleet);
    assert_eq!(cold.hashed_blocks(), 1);
}

type History = Vec<(u64, u32, usize, bool)>;

proptest! {
    #[test]
    fn a_query_changes_nothing_and_the_next_says_the_same(
        history in prop::collection::vec((0_u64..4, 0_u32..3, 0_usize..12, any::<bool>()), 0..20),
        prompts in prop::collection::vec((0_u32..4, 0_usize..50), 1..6),
        loads in prop::collection::vec(prop::option::of(0_usize..30), 8),
        eagle in any::<bool>(),
    ) {
        let fixture = Fixture::new(4, eagle);
        let history: History = history;
        for (worker, start, blocks, is_device) in history {
            let tier = if is_device { Tier::Device } else { Tier::Host };
            let tokens: Vec<_> = (start..start + 50).collect();
            fixture.store(WorkerRank::new(worker / 2, u32::from(worker % 2 == 1)), tier, &tokens, blocks);
        }
        let candidates = loads.iter().zip(0..).map(|(load, at)| {
            let mut candidate = Candidate::new(WorkerRank::new(at / 2, u32::from(at % 2 == 1)));
            candidate.load = load.map(Load::new);
            candidate
        });
        let mut fleet = Fleet::new(candidates);
        let state = || {
            let ranks = fixture.index.ranks();
            let of = ranks.iter().map(|of| {
                let index = (fixture.index.held(*of), fixture.index.dump(*of), fixture.index.usage(*of));
                (*of, index, fixture.trust.standing(*of, NOW))
            });
            (of.collect::<Vec<_>>(), fixture.index.nodes_made(), fixture.trust.changes())
        };
        let before = state();
        for (start, len) in prompts {
            let tokens: Vec<_> = (start..).take(len).collect();
            let first = fixture.ask(&tokens, &mut fleet);
            let found: Vec<_> = fleet.candidates().to_vec();
            prop_assert_eq!(first, fixture.ask(&tokens, &mut fleet));
            prop_assert_eq!(&found, fleet.candidates());
            prop_assert_eq!(&state(), &before);
            // Each rank by itself, by another way through the index.
            let shape = fixture.shape(&tokens);
            let query = Query { index: &fixture.index, trust: &fixture.trust };
            let mut prompt = Prompt::new(&tokens, fixture.index.block_size(), fixture.of());
            query.overlaps(&mut prompt, shape, &mut fleet);
            let hashes = block_hashes(&tokens, fixture.index.block_size(), fixture.of());
            let asked = hashes[..hashes.len().min(shape.most_blocks())].to_vec();
            for candidate in fleet.candidates() {
                let mut prompt = Prompt::hashed(asked.clone(), fixture.index.block_size());
                let alone = fixture.index.overlap_of(candidate.of, Tier::Device, &mut prompt);
                let alone = alone.map(|alone| (alone.blocks, alone.engine));
                let here = candidate.last.map(|last| (candidate.cached_blocks, last));
                prop_assert_eq!(here, alone);
            }
            if let Ok(Answer { claim: Ok(claim), .. }) = first {
                prop_assert!(claim.blocks <= shape.most_blocks());
                prop_assert!(claim.blocks * 4 < len);
            }
        }
        prop_assert_eq!(fixture.index.check(), Ok(()));
    }
}
