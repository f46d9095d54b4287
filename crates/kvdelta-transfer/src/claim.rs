//! Whether a prefill worker may rely on a claim.

use kvdelta_indexer::{BlockSize, EngineHash};
use kvdelta_protocol::{CacheGroup, DecodeCacheInfo};
use thiserror::Error;

/// What a prefill worker knows of itself and of the claimed blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Own {
    /// Tokens in a block that its engine hashes.
    pub block_size: BlockSize,
    /// Whether its prefix cache is on: only then a skipped block may be released and found again.
    pub prefix_caching: bool,
    /// Its engine's hash of the request's block `cached_prefix_blocks - 1`; `None`: there is none.
    pub hash: Option<EngineHash>,
}

/// Why nothing is skipped by a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The prefix cache of this worker is off.
    #[error("prefix caching is off, so what is skipped could not be kept; sending all")]
    PrefixCachingOff,
    /// Hashes of blocks of another size say nothing here.
    #[error(
        "the claim is in blocks of {claim_tokens} tokens, this worker hashes blocks of {own_tokens}; sending all"
    )]
    UnequalBlocks {
        /// Tokens in a block of the claim.
        claim_tokens: u32,
        /// Tokens in a block of this worker.
        own_tokens: u32,
    },
    /// This worker has no hash at that depth.
    #[error(
        "this worker has no hash of block {last_block}, the last of the claimed ones; sending all"
    )]
    NoHash {
        /// Index of the block.
        last_block: u32,
    },
    /// The claim is of other tokens, or of another adapter or salt, or the engines hash differently.
    #[error("the claim's hash {claimed:#018x} is not {own:#018x}, this worker's own; sending all")]
    OtherContent {
        /// The claim's hash.
        claimed: u64,
        /// This worker's.
        own: u64,
    },
    /// A group of which it is not known what a prefix needs.
    #[error(
        "cache group {group} is of kind {kind:?}, of which no prefix can be skipped; sending all"
    )]
    UnknownGroup {
        /// Its place in the list.
        group: usize,
        /// What it is said to be.
        kind: CacheGroup,
    },
    /// The claim is about full and MLA attention, and there is no such group.
    #[error("none of {groups} cache groups is of full or MLA attention; sending all")]
    NothingSkippable {
        /// Number of groups.
        groups: usize,
    },
    /// The claim covers no block that would be left out.
    #[error("a claim of {claimed_tokens} tokens leaves nothing to skip; sending all")]
    NothingToSkip {
        /// Tokens that it covers.
        claimed_tokens: u64,
    },
}

impl Refusal {
    /// The label of the metric: `content`, `capability` or `invalid`.
    pub const fn as_label(self) -> &'static str {
        match self {
            Self::NoHash { .. } | Self::OtherContent { .. } => "content",
            Self::PrefixCachingOff
            | Self::UnequalBlocks { .. }
            | Self::UnknownGroup { .. }
            | Self::NothingSkippable { .. } => "capability",
            Self::NothingToSkip { .. } => "invalid",
        }
    }
}

/// Believes a claim whose hash is this worker's own at the same depth.
///
/// The claim was checked against its prompt before ([`DecodeCacheInfo::check`]).
///
/// # Errors
/// Why it is not believed; all is sent then.
pub fn believe(claim: &DecodeCacheInfo, own: &Own) -> Result<(), Refusal> {
    if !own.prefix_caching {
        return Err(Refusal::PrefixCachingOff);
    }
    if claim.block_size != own.block_size {
        return Err(Refusal::UnequalBlocks {
            claim_tokens: claim.block_size.into(),
            own_tokens: own.block_size.into(),
        });
    }
    match own.hash {
        Some(hash) if hash == claim.prefix_hash => Ok(()),
        Some(hash) => Err(Refusal::OtherContent {
            claimed: claim.prefix_hash.0,
            own: hash.0,
        }),
        None => Err(Refusal::NoHash {
            last_block: claim.cached_prefix_blocks.saturating_sub(1),
        }),
    }
}
