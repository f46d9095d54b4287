//! The claim: what a decode worker is believed to hold of a prompt.

use kvdelta_indexer::{BlockSize, DpRank, EngineHash, WorkerId, WorkerRank};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

/// The version of [`DecodeCacheInfo`] that this crate writes, and the only one that it reads.
pub const VERSION: u32 = 1;

/// What the chosen decode worker is believed to hold of the prompt; on a prefill request only.
///
/// A hint: the decode worker confirms it by its own lookup before anything that prefill skipped is relied
/// on. RFC phase 2, `DecodeCacheInfo`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecodeCacheInfo {
    /// [`VERSION`].
    pub version: u32,
    /// Unique to this attempt of the request.
    pub claim_id: String,
    /// The decode worker that is booked for the request.
    pub decode_worker_id: WorkerId,
    /// Its rank, whose cache the claim is about.
    pub decode_dp_rank: DpRank,
    /// Whole blocks in its device memory from position 0 without a hole, at least 1.
    pub cached_prefix_blocks: u32,
    /// Tokens in such a block.
    pub block_size: BlockSize,
    /// The engine's hash of the last of them.
    pub prefix_hash: EngineHash,
}

/// A claim that contradicts itself or its prompt.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BadClaim {
    /// A version that this reader does not know.
    #[error("decode_cache_info has version {0}, known is {VERSION}; sending all")]
    Version(u32),
    /// No id.
    #[error("decode_cache_info has no claim_id; sending all")]
    NoId,
    /// A claim of nothing.
    #[error("claim {0} is of no block; sending all")]
    NoBlocks(String),
    /// More than a prompt of that length can have skipped.
    #[error(
        "claim {claim_id} of {claimed_blocks} blocks exceeds the {most_blocks} that a prompt of {prompt_tokens} tokens allows; sending all"
    )]
    TooManyBlocks {
        /// Whose.
        claim_id: String,
        /// Blocks that it says.
        claimed_blocks: u32,
        /// Blocks that it may say.
        most_blocks: usize,
        /// Tokens of the prompt.
        prompt_tokens: usize,
    },
}

impl DecodeCacheInfo {
    /// The rank that it is about.
    pub const fn of(&self) -> WorkerRank {
        WorkerRank {
            worker: self.decode_worker_id,
            rank: self.decode_dp_rank,
        }
    }

    /// Tokens that it covers.
    pub fn cached_prefix_tokens(&self) -> usize {
        let blocks = usize::try_from(self.cached_prefix_blocks).unwrap_or(usize::MAX);
        blocks.saturating_mul(self.block_size.tokens())
    }

    /// Checks it against itself and the prompt that it came with.
    ///
    /// # Errors
    /// [`BadClaim`], which says what is wrong; the claim is then ignored.
    pub fn check(&self, prompt_tokens: usize) -> Result<(), BadClaim> {
        if self.version != VERSION {
            return Err(BadClaim::Version(self.version));
        }
        if self.claim_id.is_empty() {
            return Err(BadClaim::NoId);
        }
        if self.cached_prefix_blocks == 0 {
            return Err(BadClaim::NoBlocks(self.claim_id.clone()));
        }
        if self.cached_prefix_tokens() >= prompt_tokens {
            return Err(BadClaim::TooManyBlocks {
                claim_id: self.claim_id.clone(),
                claimed_blocks: self.cached_prefix_blocks,
                most_blocks: prompt_tokens.saturating_sub(1) / self.block_size.tokens(),
                prompt_tokens,
            });
        }
        Ok(())
    }
}

/// For `#[serde(default, deserialize_with)]` of an optional claim: one that cannot be read, or is of another
/// version, is none, so that a request is never refused for it.
///
/// # Errors
/// None of its own: those of a format whose next value cannot be had at all.
pub fn deserialize_known<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<DecodeCacheInfo>, D::Error> {
    match Sent::deserialize(deserializer)? {
        Sent::Claim(claim) if claim.version == VERSION => Ok(Some(claim)),
        Sent::Claim(_) | Sent::Other(_) => Ok(None),
    }
}

/// Whatever stands where a claim may; of any format, so not by way of a JSON value.
#[derive(Deserialize)]
#[serde(untagged)]
enum Sent {
    Claim(DecodeCacheInfo),
    Other(IgnoredAny),
}
