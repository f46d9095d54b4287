//! Names of workers, ranks, tiers and hashes, each a type of its own so that two cannot be swapped.

use std::fmt;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::error::BadBlockSize;

/// A worker's instance id, as Dynamo's discovery gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub u64);

/// A data-parallel rank within one worker, counted over the whole deployment as Dynamo does.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct DpRank(pub u32);

/// One data-parallel rank of one worker: what has a KV cache of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerRank {
    /// The worker.
    pub worker: WorkerId,
    /// Its rank.
    pub rank: DpRank,
}

impl WorkerRank {
    /// Rank `rank` of worker `worker`.
    pub const fn new(worker: u64, rank: u32) -> Self {
        Self {
            worker: WorkerId(worker),
            rank: DpRank(rank),
        }
    }
}

impl fmt::Display for WorkerRank {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.worker.0, self.rank.0)
    }
}

/// Where a block lies. Only `Device` backs a claim; the others have to be loaded first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Memory of the accelerator, or of the CPU where that computes.
    Device,
    /// Memory of the host.
    Host,
    /// Disk, and whatever an engine calls storage.
    Disk,
}

impl Tier {
    /// All tiers, nearest first.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Disk];
}

/// Hash of one block's tokens, seeded with its namespace: Dynamo's `LocalBlockHash`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u64);

/// Chained hash of a prefix, computed by the router: Dynamo's `SequenceHash`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SequenceHash(pub u64);

/// The engine's own chained hash of a block, as its events told it; never computed here.
///
/// Engines that send bytes are represented by their last 64 bits, big endian, which is what vLLM sends
/// when it is set to integers (`vllm/v1/core/kv_cache_utils.py`, `maybe_convert_block_hash`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EngineHash(pub u64);

/// Whose blocks may be shared: LoRA adapter and cache salt, as the seed of their block hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Namespace(pub u64);

/// Tokens in a block, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// Tokens in a block.
    pub const fn tokens(self) -> usize {
        self.0.get() as usize
    }
}

impl TryFrom<u32> for BlockSize {
    type Error = BadBlockSize;

    fn try_from(tokens: u32) -> Result<Self, BadBlockSize> {
        NonZeroU32::new(tokens).map(Self).ok_or(BadBlockSize)
    }
}

impl From<BlockSize> for u32 {
    fn from(size: BlockSize) -> Self {
        size.0.get()
    }
}
