//! What a decode worker makes of a cut offer: whether it may be read, and which block goes where.

use kvdelta_indexer::{BlockSize, EngineHash};

use crate::offer::OfferHead;

/// What a decode worker's own lookup says of a cut offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confirmation {
    /// It holds all that was skipped: the offer may be read.
    Covered {
        /// Blocks that were skipped.
        held_blocks: u32,
    },
    /// A stale claim: nothing may be read.
    Stale {
        /// Blocks of what was skipped that it holds.
        held_blocks: u32,
        /// Blocks that it lacks, at least 1.
        short_blocks: u32,
    },
    /// The offer is of another prompt than the request, or cannot be compared with it: nothing may be read.
    OtherContent {
        /// Blocks that were skipped, none of which it can rely on.
        short_blocks: u32,
    },
}

impl Confirmation {
    /// Blocks of what was skipped that the worker holds.
    pub const fn held_blocks(self) -> u32 {
        match self {
            Self::Covered { held_blocks } | Self::Stale { held_blocks, .. } => held_blocks,
            Self::OtherContent { .. } => 0,
        }
    }

    /// Blocks of what was skipped that it lacks.
    pub const fn short_blocks(self) -> u32 {
        match self {
            Self::Covered { .. } => 0,
            Self::Stale { short_blocks, .. } | Self::OtherContent { short_blocks } => short_blocks,
        }
    }
}

/// Compares an offer that was checked with what this worker's own lookup found.
///
/// `held_tokens` are cached from position 0 without a hole, `own_hash` is this worker's hash of block
/// `offer.first_block - 1` of the request, which it has whether or not it holds that block.
pub fn confirm(
    offer: &OfferHead,
    block_size: BlockSize,
    held_tokens: usize,
    own_hash: Option<EngineHash>,
) -> Confirmation {
    let skipped = offer.first_block;
    if block_size != offer.block_size || own_hash != Some(offer.prefix_hash) {
        return Confirmation::OtherContent {
            short_blocks: skipped,
        };
    }
    let held = u32::try_from(held_tokens / block_size.tokens()).unwrap_or(u32::MAX);
    match skipped.checked_sub(held) {
        None | Some(0) => Confirmation::Covered {
            held_blocks: skipped,
        },
        Some(short_blocks) => Confirmation::Stale {
            held_blocks: held,
            short_blocks,
        },
    }
}

/// Blocks `[first, first + blocks)` of one cache group, counted from the start of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// The first one.
    pub first: u32,
    /// How many.
    pub blocks: u32,
}

impl BlockRange {
    fn end(self) -> u64 {
        u64::from(self.first) + u64::from(self.blocks)
    }
}

/// Which entries of two lists of blocks are the same blocks of the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Paired {
    /// Place of the first shared block in the prefill worker's list; 0 where none is shared.
    pub prefill_at: u32,
    /// Its place in the decode worker's list; 0 where none is shared.
    pub decode_at: u32,
    /// How many blocks follow each other from there in both; may be 0.
    pub blocks: u32,
}

/// Pairs what a prefill worker offers of a group with what a decode worker wants of it, by index in the prompt.
///
/// Never by count: a decode prompt may be longer than what was prefilled, and lists of the same length may be of
/// different blocks.
pub fn pair(prefill: BlockRange, decode: BlockRange) -> Paired {
    let start = prefill.first.max(decode.first);
    let end = prefill.end().min(decode.end());
    match u32::try_from(end.saturating_sub(start.into())) {
        Ok(0) | Err(_) => Paired::default(),
        Ok(blocks) => Paired {
            prefill_at: start - prefill.first,
            decode_at: start - decode.first,
            blocks,
        },
    }
}
