//! Why an event, or the rest of one, did not reach the index.

use thiserror::Error;

use crate::ids::{EngineHash, Tier};

/// Why an event was left out, or from which block on.
///
/// Its neighbours in the batch are not touched by it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Skipped {
    /// No event, or one without a field that it must have.
    #[error("{field} of a {event} event is {found}")]
    Malformed {
        /// The event's type, as far as it could be read.
        event: &'static str,
        /// The field.
        field: &'static str,
        /// What stands there.
        found: String,
    },
    /// A type that this decoder does not know.
    #[error("event type {0:?} is not known")]
    UnknownType(String),
    /// A medium that is no tier of this worker's; it cannot be the device's, which is always named alike.
    #[error("medium {0:?} is not known")]
    UnknownMedium(String),
    /// Storage that workers share: no rank holds it.
    #[error("medium {0:?} is shared storage")]
    SharedStorage(String),
    /// Another worker's copy.
    #[error("locality {0:?} is not this worker's")]
    NotLocal(String),
    /// Blocks of somebody who lives on when this worker goes.
    #[error("owner {0:?} is not this worker")]
    OtherOwner(String),
    /// An owner that this decoder does not know.
    #[error("owner {owner:?} is not known")]
    UnknownOwner {
        /// Its name.
        owner: String,
        /// Where its blocks lie.
        tier: Tier,
    },
    /// A cache group that is not full attention.
    #[error("blocks of a {0} group")]
    OtherKind(String),
    /// A kind of cache group that this decoder does not know.
    #[error("cache group kind {0:?} is not known")]
    UnknownKind(String),
    /// A cache group that is not the one whose blocks count.
    #[error("cache group {0} is not the one whose blocks count")]
    OtherGroup(u32),
    /// Blocks of another size than the index's.
    #[error("blocks of {found} tokens where the index has {expected}")]
    BlockSize {
        /// The event's.
        found: u64,
        /// The index's.
        expected: u32,
    },
    /// Not as many tokens as its blocks hold: which token belongs to which block cannot be said.
    #[error("{tokens} tokens for {blocks} blocks of {block_size}")]
    Counts {
        /// Tokens in the event.
        tokens: usize,
        /// Block hashes in it.
        blocks: usize,
        /// Tokens in each.
        block_size: u32,
    },
    /// Something besides its tokens decided a block's hash, and it is not known what. The blocks before
    /// it were taken.
    #[error("extra key {key} of block {block} cannot be attributed")]
    UnattributedKey {
        /// The block's place in the event, from 0.
        block: usize,
        /// The key.
        key: String,
    },
    /// A LoRA adapter of which only the number is known.
    #[error("LoRA adapter {0} without its name")]
    UnnamedLora(String),
    /// Salt and adapter are those of the parent, and the parent's are not known.
    #[error("namespace of the parent {:#x} is not known", .0.0)]
    UnknownNamespace(EngineHash),
    /// A run that begins behind position 0 and names no parent.
    #[error("a run at block {0} without a parent")]
    NoParent(u32),
}

impl Skipped {
    /// The label of the metric.
    pub fn as_label(&self) -> &'static str {
        match self {
            Self::Malformed { .. } => "malformed",
            Self::UnknownType(_) => "unknown_type",
            Self::UnknownMedium(_) => "unknown_medium",
            Self::SharedStorage(_) => "shared_storage",
            Self::NotLocal(_) => "remote_locality",
            Self::OtherOwner(_) => "unsupported_ownership",
            Self::UnknownOwner { .. } => "unknown_ownership",
            Self::OtherKind(_) => "unsupported_kind",
            Self::UnknownKind(_) => "unknown_kind",
            Self::OtherGroup(_) => "unsupported_group",
            Self::BlockSize { .. } => "block_size_mismatch",
            Self::Counts { .. } => "count_mismatch",
            Self::UnattributedKey { .. } => "unattributed_key",
            Self::UnnamedLora(_) => "unnamed_lora",
            Self::UnknownNamespace(_) => "unknown_namespace",
            Self::NoParent(_) => "no_parent",
        }
    }

    /// Whether the event may have changed something that the index should know and now does not, so that
    /// the rank's trust has to go down.
    ///
    /// Not so for what is left out by design: the index then says less than the rank holds, never more.
    pub fn may_hide_changes(&self) -> bool {
        match self {
            Self::Malformed { .. } | Self::UnknownType(_) | Self::Counts { .. } => true,
            Self::UnknownOwner { tier, .. } => *tier == Tier::Device,
            Self::UnknownMedium(_)
            | Self::SharedStorage(_)
            | Self::NotLocal(_)
            | Self::OtherOwner(_)
            | Self::OtherKind(_)
            | Self::UnknownKind(_)
            | Self::OtherGroup(_)
            | Self::BlockSize { .. }
            | Self::UnattributedKey { .. }
            | Self::UnnamedLora(_)
            | Self::UnknownNamespace(_)
            | Self::NoParent(_) => false,
        }
    }
}

/// At most the first 64 characters of what somebody sent.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}
