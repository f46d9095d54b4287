//! The one form that events of every engine take before they reach the index.

use serde::{Deserialize, Serialize};

use crate::ids::{BlockHash, EngineHash, Namespace, Tier, WorkerRank};

/// One change of one rank's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Whose cache.
    pub of: WorkerRank,
    /// What happened.
    pub change: Change,
}

/// What happened to a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Blocks with known content came in.
    Stored(Stored),
    /// Blocks came into `tier` that the same rank announced earlier with their content. Engines tell no
    /// tokens when they offload.
    Placed {
        /// Where to.
        tier: Tier,
        /// The engine's hashes.
        engine_hashes: Vec<EngineHash>,
    },
    /// Blocks left `tier`.
    Removed {
        /// Where from.
        tier: Tier,
        /// The engine's hashes.
        engine_hashes: Vec<EngineHash>,
    },
    /// The cache was emptied. The event cannot say of which tier: all of them count as empty, which can
    /// only say too little.
    Cleared,
}

/// A run of consecutive blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Where they lie.
    pub tier: Tier,
    /// The block before the first one; `None`: the first one begins a prompt.
    pub parent: Option<EngineHash>,
    /// Seed of the block hashes: the chain's LoRA adapter and salt. `None`: the feed does not tell.
    pub namespace: Option<Namespace>,
    /// In the order of their positions.
    pub blocks: Vec<StoredBlock>,
    /// Whether a hash that is stored twice means a second physical copy.
    pub copies: Copies,
    /// How the blocks came in, where the engine says it.
    pub source: Option<Source>,
}

/// One block of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Hash of its tokens.
    pub block: BlockHash,
    /// The engine's name for it.
    pub engine: EngineHash,
}

/// What a second store of the same hash means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Copies {
    /// A second physical block, with a removal of its own (vLLM).
    Counted,
    /// The same block again; one removal removes it (SGLang, Dynamo's event plane, which counts before it
    /// sends).
    Single,
}

/// How a block came into a cache (RFC, broken link 2). Today's engines do not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Computed by the worker.
    Local,
    /// Received from another worker.
    Transferred,
}
