//! The facts that a choice may see.

use std::fmt;

use kvdelta_indexer::{EngineHash, WorkerRank};

use crate::claimable::{Cached, PromptShape};
use crate::cost::Share;
use crate::sizes::Place;

/// Blocks that the router has booked on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Blocks of the requests that run or are booked there, this one not among them: Dynamo's
    /// `active_decode_blocks`.
    ///
    /// Dynamo books the decode leg in full, so a prefix that many requests share counts once for each of them
    /// and the rank may have more room than this says, not less; generated blocks count where the router
    /// follows them (`router_track_output_blocks`).
    pub active_blocks: usize,
    /// Blocks that this request would add: Dynamo's `additional_active_blocks`. `None`: all of the prompt.
    pub added_blocks: Option<usize>,
}

impl Load {
    /// `active_blocks` now, and all blocks of the prompt to come.
    pub const fn new(active_blocks: usize) -> Self {
        Self {
            active_blocks,
            added_blocks: None,
        }
    }

    /// Blocks with this request booked, as Dynamo's cost counts them.
    pub fn with_request(self, shape: PromptShape) -> usize {
        self.with_prompt(shape.blocks())
    }

    #[inline]
    pub(crate) fn with_prompt(self, blocks: usize) -> usize {
        let added = self.added_blocks.unwrap_or(blocks);
        self.active_blocks.saturating_add(added)
    }
}

/// One decode rank. Ranks of one worker are candidates of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Candidate {
    /// Which.
    pub of: WorkerRank,
    /// Whole blocks of the prompt in its device memory, from position 0 without a hole. 0 also where its
    /// events are not followed.
    pub cached_blocks: usize,
    /// The engine's hash of the last of them; `None`: nothing cached, or the index does not tell it.
    pub last: Option<EngineHash>,
    /// `None`: not known, as of a worker that has just registered. It is not taken for 0, which would draw
    /// everything there, nor for a large one, which would leave it idle, but for the least that is known of a
    /// candidate that may be chosen, so that it has the chance of an equal; where none is known, for this
    /// request alone. With its first request booked there it is known.
    pub load: Option<Load>,
    /// Blocks of its KV cache: Dynamo's `total_kv_blocks`, of one rank. `None`: not known, and neither is
    /// whether it has room or is busy.
    pub capacity_blocks: Option<usize>,
    /// Why the caller rules it out: allowed workers, taints, discovery. `None`: it may be chosen.
    pub refused: Option<Refusal>,
    /// Its place in the order of all decode ranks: a [`Fleet`](crate::Fleet) sets it. `None`: it has none, and no
    /// size of prompt is nearer to it than another.
    pub place: Option<Place>,
}

impl Candidate {
    /// A rank of which nothing is known.
    pub const fn new(of: WorkerRank) -> Self {
        Self {
            of,
            cached_blocks: 0,
            last: None,
            load: None,
            capacity_blocks: None,
            refused: None,
            place: None,
        }
    }

    /// With a place in the order of all decode ranks.
    pub const fn with_place(mut self, place: Place) -> Self {
        self.place = Some(place);
        self
    }

    /// With what the router has booked.
    pub const fn with_load(mut self, load: Load) -> Self {
        self.load = Some(load);
        self
    }

    /// With the size of its KV cache.
    pub const fn with_capacity(mut self, blocks: usize) -> Self {
        self.capacity_blocks = Some(blocks);
        self
    }

    /// Ruled out.
    pub const fn refused(mut self, why: Refusal) -> Self {
        self.refused = Some(why);
        self
    }

    /// With what its cache holds of the prompt.
    pub const fn with_cached(mut self, blocks: usize, last: Option<EngineHash>) -> Self {
        self.cached_blocks = blocks;
        self.last = last;
        self
    }

    /// What is cached, to make a claim of.
    pub const fn cached(&self) -> Cached {
        Cached {
            of: self.of,
            blocks: self.cached_blocks,
            last: self.last,
        }
    }

    /// Blocks of the prompt that it lacks, the last one begun among them.
    pub fn missing_blocks(&self, shape: PromptShape) -> usize {
        shape.blocks().saturating_sub(self.cached_blocks)
    }

    /// Why it may not be chosen, whatever it has cached.
    pub fn refusal(&self, shape: PromptShape, busy: Option<Share>) -> Option<Refusal> {
        self.refusal_of(shape.blocks(), busy)
    }

    /// As `refusal`, for a prompt of so many blocks.
    ///
    /// Cached blocks may be in use already or not, so the request takes up at least the missing ones: a rank
    /// is refused where not even these fit.
    #[inline]
    pub(crate) fn refusal_of(&self, prompt: usize, busy: Option<Share>) -> Option<Refusal> {
        if self.refused.is_some() {
            return self.refused;
        }
        let capacity = self.capacity_blocks?;
        let missing = prompt.saturating_sub(self.cached_blocks);
        let active = self.load.map_or(0, |load| load.active_blocks);
        let free = capacity.saturating_sub(active);
        if free < missing {
            return Some(Refusal::NoRoom { free, missing });
        }
        let line = busy?.of(capacity);
        (active as f64 > line).then_some(Refusal::Busy { active, capacity })
    }
}

/// One prefill rank, for the cost of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefillCandidate {
    /// Which.
    pub of: WorkerRank,
    /// Whole blocks of the prompt that it need not compute.
    pub cached_blocks: usize,
    /// Prompt tokens that it has still to compute for others: Dynamo's `active_prefill_tokens`. `None`: not
    /// known; taken for the least that is known of a candidate that may be chosen, and where none is, for as many
    /// as this prompt has.
    pub queued_tokens: Option<usize>,
    /// Why the caller rules it out.
    pub refused: Option<Refusal>,
}

impl PrefillCandidate {
    /// A rank of which nothing is known.
    pub const fn new(of: WorkerRank) -> Self {
        Self {
            of,
            cached_blocks: 0,
            queued_tokens: None,
            refused: None,
        }
    }

    /// With the prompt tokens that it has still to compute.
    pub const fn with_queued(mut self, tokens: usize) -> Self {
        self.queued_tokens = Some(tokens);
        self
    }

    /// With what its cache holds of the prompt.
    pub const fn with_cached(mut self, blocks: usize) -> Self {
        self.cached_blocks = blocks;
        self
    }

    /// Ruled out.
    pub const fn refused(mut self, why: Refusal) -> Self {
        self.refused = Some(why);
        self
    }

    /// Tokens of the prompt that it has to compute itself, the last one always.
    ///
    /// `block_size` of the decode worker: unequal sizes are translated before.
    pub fn uncached_tokens(&self, shape: PromptShape) -> usize {
        let cached = self.cached_blocks.saturating_mul(shape.block_size.tokens());
        let computed = usize::from(shape.prompt_tokens > 0);
        shape.prompt_tokens.saturating_sub(cached).max(computed)
    }
}

/// Why a candidate is not chosen, whatever it costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// Not among the workers that the request may go to, or pinned elsewhere.
    NotAllowed,
    /// Lacks a required taint, as that of the prefill worker's topology domain.
    Taint,
    /// Gone, draining, or not serving the request's adapter.
    Unavailable,
    /// It, or Dynamo's worker monitor, says that it is overloaded.
    Overloaded,
    /// The blocks that it lacks of the prompt do not fit beside those in use.
    NoRoom {
        /// Blocks of its cache that no booked request counts.
        free: usize,
        /// Blocks of the prompt that it lacks.
        missing: usize,
    },
    /// The blocks in use are past the busy line.
    Busy {
        /// Blocks in use, this request not among them.
        active: usize,
        /// Blocks of its cache.
        capacity: usize,
    },
    /// No link between it and any prefill worker that may be chosen.
    NoLink,
}

impl Refusal {
    /// The label of the metric.
    pub const fn as_label(self) -> &'static str {
        Self::LABELS[self.place()]
    }

    pub(crate) const LABELS: [&'static str; 7] = [
        "not_allowed",
        "taint",
        "unavailable",
        "overloaded",
        "no_room",
        "busy",
        "no_link",
    ];

    const fn place(self) -> usize {
        match self {
            Self::NotAllowed => 0,
            Self::Taint => 1,
            Self::Unavailable => 2,
            Self::Overloaded => 3,
            Self::NoRoom { .. } => 4,
            Self::Busy { .. } => 5,
            Self::NoLink => 6,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAllowed => write!(out, "not among the allowed workers"),
            Self::Taint => write!(out, "lacks a required taint"),
            Self::Unavailable => write!(out, "gone, draining or without the adapter"),
            Self::Overloaded => write!(out, "overloaded"),
            Self::NoRoom { free, missing } => {
                write!(out, "{missing} blocks missing, room for {free}")
            }
            Self::Busy { active, capacity } => {
                write!(out, "busy with {active} of {capacity} blocks")
            }
            Self::NoLink => write!(out, "no link to a prefill worker"),
        }
    }
}

/// How many candidates were refused, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusals([usize; Refusal::LABELS.len()]);

impl Refusals {
    pub(crate) fn count(&mut self, why: Refusal) {
        self.0[why.place()] += 1;
    }

    /// All of them.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }

    /// Label and number of each reason that occurred.
    pub fn by_reason(&self) -> impl Iterator<Item = (&'static str, usize)> {
        let all = Refusal::LABELS.into_iter().zip(self.0);
        all.filter(|(_, count)| *count > 0)
    }
}

impl fmt::Display for Refusals {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} refused", self.total())?;
        for (at, (label, count)) in self.by_reason().enumerate() {
            let before = if at == 0 { " (" } else { ", " };
            write!(out, "{before}{label} {count}")?;
        }
        let after = if self.total() > 0 { ")" } else { "" };
        write!(out, "{after}")
    }
}
