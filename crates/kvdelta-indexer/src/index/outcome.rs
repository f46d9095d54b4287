//! What the index answers.

use crate::event::Stored;
use crate::hash::next_sequence_hash;
use crate::ids::{BlockHash, EngineHash, SequenceHash, Tier, WorkerRank};

/// What an event changed, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Blocks that the tier did not hold before.
    pub stored_blocks: u64,
    /// Blocks that it held already: second copies, or an event told twice.
    pub repeated_blocks: u64,
    /// Blocks that left the tier for good.
    pub removed_blocks: u64,
    /// Hashes that the rank does not hold there: nothing to remove or to place.
    pub unknown_blocks: u64,
    /// Why the event was not applied, if it was not.
    pub refused: Option<Refused>,
}

impl Applied {
    pub(crate) fn refused(why: Refused) -> Self {
        Self {
            refused: Some(why),
            ..Self::default()
        }
    }

    pub(crate) fn count_stored(&mut self, is_new: bool) {
        self.stored_blocks += u64::from(is_new);
        self.repeated_blocks += u64::from(!is_new);
    }
}

/// Why an event was not applied. Save for `Full`, nothing was changed by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refused {
    /// The rank was never admitted, or was removed: a late event.
    NotAdmitted,
    /// The rank does not hold the parent: its store was missed, or it was removed.
    UnknownParent,
    /// The rank holds blocks of different content under the parent's hash.
    AmbiguousParent,
    /// A block names itself as its parent.
    SelfParent,
    /// The index has no room left, which takes billions of blocks; what fitted was stored.
    Full,
}

impl Refused {
    /// The label of the metric.
    pub fn as_label(self) -> &'static str {
        match self {
            Self::NotAdmitted => "not_admitted",
            Self::UnknownParent => "unknown_parent",
            Self::AmbiguousParent => "ambiguous_parent",
            Self::SelfParent => "self_parent",
            Self::Full => "full",
        }
    }

    /// What is wrong with the run by itself, whoever sent it.
    pub(crate) fn of(stored: &Stored) -> Option<Self> {
        let parent = stored.parent?;
        let mut blocks = stored.blocks.iter();
        blocks
            .any(|block| block.engine == parent)
            .then_some(Self::SelfParent)
    }
}

/// What one rank holds of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Overlap {
    /// Whose cache.
    pub of: WorkerRank,
    /// In which tier.
    pub tier: Tier,
    /// Blocks from position 0 without a hole, at least 1.
    pub blocks: usize,
    /// The rank's own engine hash of the last of them, which a claim carries.
    pub engine: EngineHash,
}

/// One block that a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Held {
    /// Where.
    pub tier: Tier,
    /// Its place in the prompt, counted in blocks from 0.
    pub position: usize,
    /// The prefix that ends with it.
    pub sequence: SequenceHash,
    /// The engine's name for it.
    pub engine: EngineHash,
}

impl Held {
    /// The last block of `path`, which must not be empty.
    pub(crate) fn new(tier: Tier, path: &[BlockHash], engine: EngineHash) -> Self {
        let sequence = path.iter().fold(None, |parent, block| {
            Some(next_sequence_hash(parent, *block))
        });
        Self {
            tier,
            position: path.len().saturating_sub(1),
            sequence: sequence.unwrap_or(SequenceHash(0)),
            engine,
        }
    }
}

/// How much of a tier is held by more than one rank, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// Blocks of all ranks together.
    pub held: u64,
    /// Different prefixes (`SequenceHash`) among them.
    pub distinct: u64,
    /// Prefixes that more than one rank holds.
    pub shared: u64,
}

/// How much a rank holds, and what holding it costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Blocks in device memory, host memory and on disk; second copies count once.
    pub blocks: [u64; Tier::ALL.len()],
}
