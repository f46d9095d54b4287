// SPDX-License-Identifier: Apache-2.0

//! A claim, and a prefill worker that can believe it.

use kvdelta_indexer::{BlockSize, DpRank, EngineHash, WorkerId};
use kvdelta_protocol::{DecodeCacheInfo, VERSION};
use kvdelta_transfer::Own;

/// Above 2^63, as half of the hashes are.
pub(crate) const HASH: EngineHash = EngineHash(u64::MAX - 1);

pub(crate) fn size(tokens: u32) -> BlockSize {
    BlockSize::try_from(tokens).expect("not 0")
}

/// A claim of `blocks` blocks of `tokens` tokens.
pub(crate) fn claim(blocks: u32, tokens: u32) -> DecodeCacheInfo {
    DecodeCacheInfo {
        version: VERSION,
        claim_id: "c-1".to_owned(),
        decode_worker_id: WorkerId(42),
        decode_dp_rank: DpRank(0),
        cached_prefix_blocks: blocks,
        block_size: size(tokens),
        prefix_hash: HASH,
    }
}

/// A prefill worker that can believe [`claim`]s.
pub(crate) fn own(tokens: u32) -> Own {
    Own {
        block_size: size(tokens),
        prefix_caching: true,
        hash: Some(HASH),
    }
}
