//! What the ZMQ payloads of vLLM and SGLang say, before it is known what it means to the index.

use thiserror::Error;

use crate::event::Source;
use crate::hash::MediaHash;
use crate::ids::{DpRank, EngineHash};
use crate::wire::engine;
use crate::wire::msgpack::Cursor;
use crate::wire::skipped::Skipped;

/// Why a payload is no batch. Nothing of it can be told apart, so all of it is lost.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BadBatch {
    /// The bytes end too early, or are no MessagePack.
    #[error("a batch of KV events that is cut short or no MessagePack, {0} bytes")]
    Broken(usize),
    /// Something else stands where a part of the batch should.
    #[error("{field} of a batch of KV events is {found}")]
    Field {
        /// The part.
        field: &'static str,
        /// What stands there.
        found: &'static str,
    },
}

/// One ZMQ payload of an engine: `[seconds, [event, ...], rank]`.
///
/// The events are decoded one by one as they are asked for, each on its own, so that a batch takes no
/// memory besides its bytes.
#[derive(Clone, Copy, Debug)]
pub struct WireBatch<'a> {
    /// When the engine sent it, in seconds since 1970 by its clock.
    pub sent_at: f64,
    /// The rank whose events these are. It goes before the rank of the socket it came by; `None`: the
    /// engine does not tell, and the socket's counts.
    pub rank: Option<DpRank>,
    events: Cursor<'a>,
    len: usize,
}

impl<'a> WireBatch<'a> {
    /// Reads the frame of a batch.
    ///
    /// # Errors
    ///
    /// If the frame itself is broken. A broken event is not an error: see [`Self::events`].
    pub fn decode(payload: &'a [u8]) -> Result<Self, BadBatch> {
        let whole = Cursor::new(payload).value();
        let mut parts = Cursor::new(whole.ok_or(BadBatch::Broken(payload.len()))?);
        let bad = |field, at: Cursor<'_>| BadBatch::Field {
            field,
            found: at.found(),
        };
        let count = parts.array().ok_or_else(|| bad("whole", parts))?;
        let sent_at = parts.seconds().ok_or_else(|| bad("time", parts))?;
        let mut events = match count {
            0 | 1 => return Err(bad("events", Cursor::new(&[]))),
            _ => Cursor::new(parts.value().ok_or(BadBatch::Broken(payload.len()))?),
        };
        let len = events.array().ok_or_else(|| bad("events", events))?;
        let rank = if count < 3 || parts.is_nil() {
            None
        } else {
            let rank = parts.unsigned().and_then(|rank| u32::try_from(rank).ok());
            Some(DpRank(rank.ok_or_else(|| bad("rank", parts))?))
        };
        Ok(Self {
            sent_at,
            rank,
            events,
            len,
        })
    }

    /// How many events it holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The events in their order. One that cannot be read is an `Err` and the next one follows.
    pub fn events(&self) -> impl Iterator<Item = Result<WireEvent<'a>, Skipped>> + use<'a> {
        let mut rest = self.events;
        // `decode` measured the events, so that the cursor only runs out behind the last one.
        (0..self.len).map_while(move |_| rest.value().map(engine::decode))
    }
}

/// One event of an engine.
#[derive(Clone, Debug, PartialEq)]
pub enum WireEvent<'a> {
    /// Blocks came in.
    Stored(WireStored<'a>),
    /// Blocks left.
    Removed {
        /// The engine's hashes.
        engine_hashes: Vec<EngineHash>,
        /// Whose they were, and where.
        place: Place<'a>,
    },
    /// The cache was emptied.
    Cleared {
        /// Whose part of it; `None`: the worker's.
        owner: Option<&'a str>,
    },
}

/// A run of consecutive blocks that came in.
#[derive(Clone, Debug, PartialEq)]
pub struct WireStored<'a> {
    /// The block before the first one; `None`: the first one begins a prompt.
    pub parent: Option<EngineHash>,
    /// The engine's hashes, in the order of their positions.
    pub engine_hashes: Vec<EngineHash>,
    /// The tokens of all of them; empty where the engine tells only hashes. With `eagle` there is one
    /// more, the one behind the last block.
    pub tokens: Vec<u32>,
    /// Whether the engine hashes every block with the token behind it, and sent pairs of tokens.
    pub eagle: bool,
    /// Tokens in a block; 0 where the engine tells only hashes.
    pub block_size: u64,
    /// The LoRA adapter's name.
    pub lora: Option<&'a str>,
    /// The cache salt, where the event itself tells it; vLLM tells it with the first block of a chain.
    pub salt: Option<&'a str>,
    /// The media in each block; empty if no block has any.
    pub media: Vec<Vec<MediaHash>>,
    /// The first block that has an extra key of unknown meaning, and why it was not understood.
    pub unattributed: Option<(usize, Skipped)>,
    /// Whose they are, and where.
    pub place: Place<'a>,
    /// How they came in, where the engine says it.
    pub source: Option<Source>,
}

/// Whose blocks, and where, in the engine's own words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place<'a> {
    /// The memory; `None` or empty: the device's.
    pub medium: Option<&'a str>,
    /// `LOCAL`, or that of another worker.
    pub locality: Option<&'a str>,
    /// Whose lifetime the blocks have; `None`: the worker's.
    pub owner: Option<&'a str>,
    /// Which of the model's cache groups.
    pub group: Option<u32>,
    /// What that group is for.
    pub kind: Option<&'a str>,
}
