//! Costs and the adapter beside Dynamo's reference selector and its index.

use std::collections::{BTreeSet, HashMap, HashSet};

use dynamo_kv_router::config::KvRouterConfig;
use dynamo_kv_router::indexer::MatchDetails;
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent, RoutingConstraints, WorkerConfigLike,
    WorkerWithDpRank,
};
use dynamo_kv_router::scheduling::{OverlapSignals, ScheduleMode, SchedulingRequest};
use dynamo_kv_router::{
    DefaultWorkerSelector, RadixTree, WorkerLoadProjection, WorkerSelectionInput, WorkerSelector,
};
use kvdelta_indexer::{BlockSize, EngineHash, WorkerRank};
use kvdelta_overlap::dynamo::{cached_of, candidate_of, rank_of};
use kvdelta_overlap::{Asked, BlockCost, Candidate, Form, PromptShape, Refusal, Weight, choose};
use proptest::prelude::*;

const BLOCK_SIZE: u32 = 16;
const RANKS: u32 = 2;
/// Draws by which every one of at most 8 equal workers shows up.
const DRAWS: u64 = 300;

struct Worker;

impl WorkerConfigLike for Worker {
    fn data_parallel_start_rank(&self) -> u32 {
        0
    }

    fn data_parallel_size(&self) -> u32 {
        RANKS
    }

    fn max_num_batched_tokens(&self) -> Option<u64> {
        None
    }

    fn total_kv_blocks(&self) -> Option<u64> {
        None
    }
}

/// One rank's active blocks, the blocks that the request adds, and its overlap.
type Facts = (usize, usize, usize);

#[derive(Clone, Debug)]
struct Case {
    prompt_tokens: usize,
    facts: Vec<Facts>,
}

impl Case {
    fn worker(at: usize) -> WorkerWithDpRank {
        let ranks = RANKS as usize;
        let rank = u32::try_from(at % ranks).unwrap();
        WorkerWithDpRank::new((at / ranks) as u64, rank)
    }

    fn load((active_decode_blocks, additional_active_blocks, _): Facts) -> WorkerLoadProjection {
        WorkerLoadProjection {
            active_decode_blocks,
            additional_active_blocks,
            ..WorkerLoadProjection::default()
        }
    }

    fn request(&self) -> SchedulingRequest {
        let mut request = SchedulingRequest {
            mode: ScheduleMode::QueryOnly { request_id: None },
            token_seq: None,
            isl_tokens: self.prompt_tokens,
            lora_name: None,
            expected_output_tokens: None,
            affinity_target: None,
            pinned_worker: None,
            allowed_worker_ids: None,
            routing_constraints: RoutingConstraints::default(),
            router_config_override: None,
            track_prefill_tokens: false,
            priority_jump: 0.0,
            strict_priority: 0,
            policy_class: None,
            session_context: None,
            overlap: OverlapSignals::default(),
            kv_transfer_candidates: None,
            retain_kv_transfer_chain: false,
            shared_cache_hits: None,
            worker_loads: Default::default(),
            resp_tx: None,
        };
        for (at, facts) in self.facts.iter().enumerate() {
            let (worker, overlap) = (Self::worker(at), &mut request.overlap);
            overlap.tier_overlap_blocks.device.insert(worker, facts.2);
            let effective = &mut overlap.effective_overlap_blocks;
            effective.insert(worker, facts.2 as f64);
            request.worker_loads.insert(worker, Self::load(*facts));
        }
        request
    }

    /// All whom Dynamo's reference picks among the workers of `allowed`.
    fn reference(&self, weight: f64, allowed: &HashSet<u64>) -> BTreeSet<WorkerRank> {
        let config = KvRouterConfig {
            overlap_score_credit: weight,
            ..KvRouterConfig::default()
        };
        let selector = DefaultWorkerSelector::new(Some(config), "decode");
        let workers: HashMap<_, _> = (0..self.facts.len() as u64 / u64::from(RANKS))
            .map(|worker| (worker, Worker))
            .collect();
        let mut request = self.request();
        request.allowed_worker_ids = Some(allowed.clone());
        let picks = (0..DRAWS).map(|seed| {
            fastrand::seed(seed);
            let eligible = request.eligibility();
            let input = WorkerSelectionInput::configured(&workers, &request, eligible, BLOCK_SIZE);
            rank_of(selector.select_worker(input).unwrap().worker)
        });
        picks.collect()
    }

    /// All whom `cost` picks among them.
    fn ours(&self, cost: BlockCost, allowed: &HashSet<u64>) -> BTreeSet<WorkerRank> {
        let candidates: Vec<_> = self
            .facts
            .iter()
            .enumerate()
            .map(|(at, facts)| {
                let (worker, mut found) = (Self::worker(at), MatchDetails::new());
                if facts.2 > 0 {
                    let scores = &mut found.overlap_scores.scores;
                    scores.insert(worker, u32::try_from(facts.2).unwrap());
                }
                let candidate = candidate_of(&found, worker, Some(Self::load(*facts)), None);
                match allowed.contains(&worker.worker_id) {
                    true => candidate,
                    false => candidate.refused(Refusal::NotAllowed),
                }
            })
            .collect();
        let block_size = BlockSize::try_from(BLOCK_SIZE).unwrap();
        let picks = (0..DRAWS).map(|tie_break| {
            let shape = PromptShape {
                prompt_tokens: self.prompt_tokens,
                block_size,
                drops_last_block: false,
            };
            let asked = Asked {
                shape,
                busy: None,
                size: None,
                tie_break,
            };
            choose(&candidates, cost, asked).unwrap().best.of()
        });
        picks.collect()
    }

    /// Both pick the same of all workers, then of all but those picked, and so on: the same order, with
    /// the same equals.
    fn same_order(&self, weight: f64, form: Form) -> Result<(), TestCaseError> {
        let cost = BlockCost {
            form,
            weight: Weight::try_from(weight).unwrap(),
        };
        let workers = self.facts.len() as u64 / u64::from(RANKS);
        let mut allowed: HashSet<u64> = (0..workers).collect();
        while !allowed.is_empty() {
            let theirs = self.reference(weight, &allowed);
            prop_assert_eq!(&self.ours(cost, &allowed), &theirs);
            allowed.retain(|worker| theirs.iter().all(|of| of.worker.0 != *worker));
        }
        Ok(())
    }
}

/// Four workers of two ranks. `in_full`: each rank counts all blocks of the prompt, as a decode pool does.
fn case(in_full: bool) -> impl Strategy<Value = Case> {
    (1_usize..12, 0_usize..16).prop_flat_map(move |(blocks, cut)| {
        let added = if in_full { blocks..=blocks } else { 0..=blocks };
        let one = (0_usize..12, added, 0..=blocks);
        let prompt_tokens = blocks * BLOCK_SIZE as usize - cut;
        prop::collection::vec(one, 8).prop_map(move |facts| Case {
            prompt_tokens,
            facts,
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_subtracted_form_is_that_of_the_reference(
        case in case(false), weight in prop_oneof![Just(0.5), Just(1.0), 0.01_f64..8.0],
    ) {
        case.same_order(weight, Form::Subtracted)?;
    }

    /// Eighths, so that nothing is rounded and equals are equal in both.
    #[test]
    fn up_to_weight_1_the_missing_form_has_the_order_of_the_reference(
        case in case(true), eighths in 1_u8..=8,
    ) {
        case.same_order(f64::from(eighths) / 8.0, Form::Missing)?;
    }
}

/// Above 1 the reference takes two for equal whose overlap outweighs their load; the missing blocks tell
/// them apart.
#[test]
fn above_weight_1_the_missing_form_goes_on_where_the_reference_cuts() {
    let case = Case {
        prompt_tokens: 160,
        facts: vec![(30, 10, 0), (30, 10, 0), (0, 10, 5), (0, 10, 9)],
    };
    let all = HashSet::from([0, 1]);
    let reference = case.reference(4.0, &all);
    let equal = BTreeSet::from([WorkerRank::new(1, 0), WorkerRank::new(1, 1)]);
    assert_eq!(reference, equal);
    let cost = |form| BlockCost {
        form,
        weight: Weight::try_from(4.0).unwrap(),
    };
    assert_eq!(case.ours(cost(Form::Subtracted), &all), equal);
    let best = BTreeSet::from([WorkerRank::new(1, 1)]);
    assert_eq!(case.ours(cost(Form::Missing), &all), best);
}

/// The adapter on Dynamo's own index: rank, depth, and the engine's hash at that depth.
#[test]
fn candidates_are_what_dynamos_index_found_of_a_rank() {
    let mut tree = RadixTree::new();
    let mut event_id = 0;
    let mut store = |worker: WorkerWithDpRank, blocks: u64| {
        event_id += 1;
        let blocks = (1..=blocks).map(|at| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(1000 + at),
            tokens_hash: LocalBlockHash(at),
            mm_extra_info: None,
        });
        let stored = KvCacheStoreData {
            parent_hash: None,
            start_position: None,
            blocks: blocks.collect(),
        };
        let event = KvCacheEvent {
            event_id,
            data: KvCacheEventData::Stored(stored),
            dp_rank: worker.dp_rank,
        };
        tree.apply_event(RouterEvent::new(worker.worker_id, event))
            .unwrap();
    };
    let (warm, other, cold) = (
        WorkerWithDpRank::new(7, 1),
        WorkerWithDpRank::new(7, 0),
        WorkerWithDpRank::new(8, 0),
    );
    store(warm, 5);
    store(other, 2);
    // The index is asked for no more than may be claimed.
    let asked: Vec<_> = (1..=4).map(LocalBlockHash).collect();
    let found = tree.find_match_details(asked, false);
    let says = |worker| {
        let cached = cached_of(&found, worker);
        (cached.of, cached.blocks, cached.last)
    };
    assert_eq!(
        says(warm),
        (WorkerRank::new(7, 1), 4, Some(EngineHash(1004)))
    );
    assert_eq!(
        says(other),
        (WorkerRank::new(7, 0), 2, Some(EngineHash(1002)))
    );
    assert_eq!(says(cold), (WorkerRank::new(8, 0), 0, None));
    let unknown = candidate_of(&found, cold, None, None);
    assert_eq!(unknown, Candidate::new(WorkerRank::new(8, 0)));
    let load = WorkerLoadProjection {
        active_decode_blocks: 3,
        additional_active_blocks: 2,
        ..WorkerLoadProjection::default()
    };
    let known = candidate_of(&found, warm, Some(load), Some(u64::MAX));
    let loads = known
        .load
        .map(|load| (load.active_blocks, load.added_blocks));
    assert_eq!(loads, Some((3, Some(2))));
    assert_eq!(known.capacity_blocks, usize::try_from(u64::MAX).ok());
}
