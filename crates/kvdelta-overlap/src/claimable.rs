//! What of a rank's cached prefix a claim may say.

use kvdelta_indexer::{BlockSize, EngineHash, Reason, Standing, Trust, WorkerRank};
use thiserror::Error;

/// The sizes of a prompt that bound a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptShape {
    /// Tokens of the prompt, all of them.
    pub prompt_tokens: usize,
    /// Tokens of a block of the decode worker.
    pub block_size: BlockSize,
    /// Whether the longest prefix that the engine reuses is one block shorter (EAGLE as SGLang has it). Of an
    /// engine that reuses one block less than matches, wherever that ends (vLLM's), nothing may be claimed.
    pub drops_last_block: bool,
}

impl PromptShape {
    /// All blocks of the prompt, the last one begun among them: Dynamo's `request_blocks`.
    pub fn blocks(&self) -> usize {
        self.prompt_tokens.div_ceil(self.block_size.tokens())
    }

    /// The most blocks that a claim about this prompt may say.
    ///
    /// Engines compute the last token always, so that block which holds it is never skipped: whole blocks
    /// of the first `prompt_tokens - 1`, one less where the engine drops the last one.
    pub fn most_blocks(&self) -> usize {
        let whole = self.prompt_tokens.saturating_sub(1) / self.block_size.tokens();
        whole.saturating_sub(usize::from(self.drops_last_block))
    }
}

/// What an event-fed index knows of one rank, asked with no more than [`PromptShape::most_blocks`] hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cached {
    /// Whose.
    pub of: WorkerRank,
    /// Whole blocks in device memory, from position 0 without a hole.
    pub blocks: usize,
    /// The engine's hash of the last of them; `None`: the index does not tell it (a remote one).
    pub last: Option<EngineHash>,
}

/// What a claim may say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimable {
    /// Whose cache.
    pub of: WorkerRank,
    /// Whole blocks from position 0, at least 1.
    pub blocks: usize,
    /// The engine's hash of the last of them.
    pub prefix_hash: EngineHash,
}

/// Why nothing may be claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NoClaim {
    /// The rank holds no block of it.
    #[error("worker {0} holds no block of the prompt that may be claimed")]
    NothingCached(WorkerRank),
    /// Its events may have holes, or are not followed.
    #[error("the events of worker {of} are not complete: {}", reason.map_or("not followed", Reason::as_label))]
    Untrusted {
        /// Whose.
        of: WorkerRank,
        /// Why; `None`: the rank is not followed.
        reason: Option<Reason>,
    },
    /// The index does not tell the engine's hash.
    #[error("the index tells no engine hash for worker {0}")]
    NoEngineHash(WorkerRank),
    /// More blocks than the prompt can have skipped: the index was asked with too many hashes.
    #[error("worker {of} is said to hold {blocks} blocks, of which {most} may be claimed at most")]
    TooMany {
        /// Whose.
        of: WorkerRank,
        /// Blocks that the index says.
        blocks: usize,
        /// Blocks that the prompt allows.
        most: usize,
    },
}

impl NoClaim {
    /// The label of the metric.
    pub const fn as_label(self) -> &'static str {
        match self {
            Self::NothingCached(_) => "nothing_cached",
            Self::Untrusted { .. } => "untrusted",
            Self::NoEngineHash(_) => "no_engine_hash",
            Self::TooMany { .. } => "too_many_blocks",
        }
    }
}

/// What may be claimed of `cached`, given how far its rank is trusted.
///
/// # Errors
/// Why not, see [`NoClaim`].
pub fn claimable(
    cached: Cached,
    standing: Option<Standing>,
    shape: PromptShape,
) -> Result<Claimable, NoClaim> {
    let of = cached.of;
    let most = shape.most_blocks();
    if cached.blocks == 0 {
        return Err(NoClaim::NothingCached(of));
    }
    if cached.blocks > most {
        let blocks = cached.blocks;
        return Err(NoClaim::TooMany { of, blocks, most });
    }
    match standing {
        Some(standing) if standing.trust == Trust::Complete => {}
        Some(Standing { reason, .. }) => return Err(NoClaim::Untrusted { of, reason }),
        None => return Err(NoClaim::Untrusted { of, reason: None }),
    }
    let prefix_hash = cached.last.ok_or(NoClaim::NoEngineHash(of))?;
    Ok(Claimable {
        of,
        blocks: cached.blocks,
        prefix_hash,
    })
}
