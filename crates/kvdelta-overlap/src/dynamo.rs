//! Candidates of a router that has Dynamo's index (`dynamo-kv-router` 1.6.1), behind the feature `dynamo`.

use dynamo_kv_router::WorkerLoadProjection;
use dynamo_kv_router::indexer::MatchDetails;
use dynamo_kv_router::protocols::WorkerWithDpRank;
use kvdelta_indexer::{EngineHash, WorkerRank};

use crate::candidate::{Candidate, Load};
use crate::claimable::Cached;

/// The rank of Dynamo's `worker`.
pub const fn rank_of(worker: WorkerWithDpRank) -> WorkerRank {
    WorkerRank::new(worker.worker_id, worker.dp_rank)
}

/// What `worker` has cached, by `found`.
///
/// `found` must be the answer of the event-fed index alone, as of `Indexer::find_primary_match_details`, to
/// no more than [`PromptShape::most_blocks`](crate::PromptShape::most_blocks) hashes: where predicted entries
/// are merged in, a score says more blocks than the hash beside it ends. A remote index tells no hash.
pub fn cached_of(found: &MatchDetails, worker: WorkerWithDpRank) -> Cached {
    let blocks = found.overlap_scores.scores.get(&worker).copied();
    let blocks = usize::try_from(blocks.unwrap_or(0)).unwrap_or(usize::MAX);
    let last = found.last_matched_hashes.get(&worker);
    Cached {
        of: rank_of(worker),
        blocks,
        last: last
            .filter(|_| blocks > 0)
            .map(|engine| EngineHash(engine.0)),
    }
}

/// A candidate with what `found` says of it, as in [`cached_of`], its projected load and its size, if these
/// are known. Dynamo's maps give 0 for a rank without a load entry; here that is `None`.
pub fn candidate_of(
    found: &MatchDetails,
    worker: WorkerWithDpRank,
    load: Option<WorkerLoadProjection>,
    total_kv_blocks: Option<u64>,
) -> Candidate {
    let cached = cached_of(found, worker);
    let mut candidate = Candidate::new(cached.of).with_cached(cached.blocks, cached.last);
    candidate.load = load.map(load_of);
    candidate.capacity_blocks =
        total_kv_blocks.map(|blocks| usize::try_from(blocks).unwrap_or(usize::MAX));
    candidate
}

/// Dynamo's projection of a rank's load with the request.
///
/// It counts whole blocks of the prompt, so one less than [`Load`] does by itself where the last block is
/// only begun, and the same one less for all ranks.
pub const fn load_of(projection: WorkerLoadProjection) -> Load {
    Load {
        active_blocks: projection.active_decode_blocks,
        added_blocks: Some(projection.additional_active_blocks),
    }
}
