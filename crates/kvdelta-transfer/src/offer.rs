//! What a prefill worker publishes of an offer that it cut.

use kvdelta_indexer::{BlockSize, EngineHash, WorkerId};
use kvdelta_protocol::{DecodeCacheInfo, VERSION};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::plan::OfferPlan;

/// The head of a cut offer, as it stands under [`OFFER_KEY`](kvdelta_protocol::OFFER_KEY).
///
/// The engine's own parameters with the lists of block ids stand beside it under `params`, so that an engine
/// without kvdelta finds nothing to load. Unknown fields are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferHead {
    /// [`VERSION`].
    pub version: u32,
    /// The claim that it was cut for.
    pub claim_id: String,
    /// The decode worker that the claim was about.
    pub decode_worker_id: WorkerId,
    /// The prefill worker's own hash of block `first_block - 1`.
    pub prefix_hash: EngineHash,
    /// Tokens in a block that both workers hash.
    pub block_size: BlockSize,
    /// Blocks from the start of the prompt that the decode worker must hold, at least 1.
    pub first_block: u32,
    /// Index of the first listed block, an entry for each group ([`OfferPlan::group_first_blocks`]).
    pub group_first_blocks: Vec<u32>,
}

/// An offer that contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BadOffer {
    /// A version that this reader does not know.
    #[error("the offer has version {0}, known is {VERSION}; computing all here")]
    Version(u32),
    /// It names no claim.
    #[error("the offer has no claim_id; computing all here")]
    NoId,
    /// It skips nothing, and is cut all the same.
    #[error("the offer for claim {0} was cut at block 0; computing all here")]
    NothingSkipped(String),
    /// It has no cache group.
    #[error("the offer for claim {0} has no cache group; computing all here")]
    NoGroups(String),
}

impl OfferHead {
    /// The head of an offer that was cut by `plan` for `claim`, which that plan believed.
    pub fn cut(claim: &DecodeCacheInfo, plan: &OfferPlan) -> Self {
        Self {
            version: VERSION,
            claim_id: claim.claim_id.clone(),
            decode_worker_id: claim.decode_worker_id,
            prefix_hash: claim.prefix_hash,
            block_size: claim.block_size,
            first_block: plan.first_block,
            group_first_blocks: plan.group_first_blocks.clone(),
        }
    }

    /// Checks it against itself, as whoever reads one does first.
    ///
    /// # Errors
    /// [`BadOffer`], which says what is wrong; nothing of the offer is read then.
    pub fn check(&self) -> Result<(), BadOffer> {
        if self.version != VERSION {
            return Err(BadOffer::Version(self.version));
        }
        if self.claim_id.is_empty() {
            return Err(BadOffer::NoId);
        }
        if self.first_block == 0 {
            return Err(BadOffer::NothingSkipped(self.claim_id.clone()));
        }
        if self.group_first_blocks.is_empty() {
            return Err(BadOffer::NoGroups(self.claim_id.clone()));
        }
        Ok(())
    }
}
