//! What a choice costs: the terms and their weights.

use std::fmt;

use kvdelta_indexer::WorkerRank;

use crate::candidate::{Candidate, PrefillCandidate};
use crate::claimable::PromptShape;
use crate::error::BadSetting;

/// A weight: finite and not negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Weight(f64);

impl Weight {
    /// The number.
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Weight {
    type Error = BadSetting;

    fn try_from(weight: f64) -> Result<Self, BadSetting> {
        let is_good = weight.is_finite() && weight >= 0.0;
        // Not -0.0, which prints as such.
        is_good
            .then_some(Self(weight.abs()))
            .ok_or(BadSetting::Weight(weight))
    }
}

/// A rate: finite and above 0.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Rate(f64);

impl Rate {
    /// The number.
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Rate {
    type Error = BadSetting;

    fn try_from(rate: f64) -> Result<Self, BadSetting> {
        let is_good = rate.is_finite() && rate > 0.0;
        is_good.then_some(Self(rate)).ok_or(BadSetting::Rate(rate))
    }
}

/// A share of a whole: from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Share(f64);

impl Share {
    /// That much of `whole`.
    pub fn of(self, whole: usize) -> f64 {
        self.0 * whole as f64
    }
}

impl TryFrom<f64> for Share {
    type Error = BadSetting;

    fn try_from(share: f64) -> Result<Self, BadSetting> {
        let is_good = (0.0..=1.0).contains(&share);
        is_good
            .then_some(Self(share))
            .ok_or(BadSetting::Share(share))
    }
}

/// A count as a number, by the short way that a processor has for those of 32 bits.
#[inline]
fn number(count: usize) -> f64 {
    u32::try_from(count).map_or(count as f64, f64::from)
}

/// How a cost in blocks weighs overlap against load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `max(0, load - weight x overlap)`: Dynamo's own (`dynamo-kv-router`,
    /// `src/scheduling/selector/reference.rs`).
    ///
    /// Candidates whose weighted overlap outweighs their load all cost 0.
    Subtracted,
    /// `load + weight x missing`, as the patch series has it since phase 1.
    ///
    /// Up to weight 1 the order is that of `Subtracted`, since a load with the request counts all blocks of
    /// the prompt and nothing is cut at 0. Above it the order is kept where `Subtracted` cuts.
    Missing,
    /// `peak / 4 x (load / peak)^4 + weight x missing x (1 + distance / 5)`, see [`Surroundings`]. An overlap of less
    /// than an eighth of the prompt counts as none.
    ///
    /// A block of load costs 1 on a worker at the peak, more above it, and an eighth on one with half of it. So
    /// overlap decides among workers that the request does not make the busiest, and load where it would. On
    /// conversations half the weight saves as much as with `Missing`, and is evener; where one prefix is hot, the
    /// same weight is less even. `docs/routing.md` has the figures.
    BelowPeak,
}

/// The power of the load in [`Form::BelowPeak`]. 3 to 6 do about the same: less overlap for more balance the higher.
const POWER: i32 = 4;
/// Times the mean load that is no peak yet. Without it, overlap would decide little in an even fleet.
const NO_PEAK: f64 = 2.0;
/// Times the mean load up to which sizes of prompts are of no account: no prompt makes a peak there.
const EVEN: f64 = 1.5;
/// How much more a block costs that travels to the rank which stands farthest from the size of its prompt. Small, so
/// that it decides where little else does: for new prompts.
const APART: f64 = 0.2;
/// The part of a prompt that an overlap must reach to count, one in so many. The first block of most prompts is often the
/// same; else the few workers that have it get all prompts while the caches of the others stay empty.
const SHORT: usize = 8;

/// What a cost by [`Form::BelowPeak`] depends on beside load and overlap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Surroundings {
    /// Blocks of load from which on a worker counts as the busiest: the largest of what is booked on a candidate that
    /// may be chosen, of twice their mean with this request, and of the prompt.
    pub peak: f64,
    /// How far the rank's place is from that of the prompt's size, 0 to 1; 0 where one of them has none, and where
    /// neither prompt nor busiest rank are past 1.5 times the mean. Short prompts, however many, then leave some
    /// workers to the long ones, of which one alone can make the peak.
    pub distance: f64,
}

/// The peak, as it is gathered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Peak {
    booked: f64,
    most: f64,
    ranks: f64,
}

impl Peak {
    /// So much is booked on a candidate that may be chosen.
    pub(crate) fn see(&mut self, active_blocks: usize) {
        let active = number(active_blocks);
        self.booked += active;
        self.most = self.most.max(active);
        self.ranks += 1.0;
    }

    /// The peak in blocks, above 0, and whether the fleet is even, with a prompt of so many blocks.
    pub(crate) fn with_prompt(self, blocks: usize) -> (f64, bool) {
        let prompt = number(blocks);
        let mean = (self.booked + prompt) / self.ranks.max(1.0);
        let most = self.most.max(prompt);
        let peak = most.max(NO_PEAK * mean).max(1.0);
        (peak, most <= EVEN * mean)
    }
}

/// A cost in blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockCost {
    /// Which formula.
    pub form: Form,
    /// Blocks of load that one block of overlap is worth; 0: load alone decides.
    pub weight: Weight,
}

impl BlockCost {
    /// What a load, an overlap and a prompt of these blocks cost, in blocks. `around` counts in `BelowPeak` alone.
    #[inline]
    pub(crate) fn of(self, load: usize, cached: usize, prompt: usize, around: Surroundings) -> f64 {
        let weight = self.weight.get();
        if self.form == Form::BelowPeak {
            let is_short = cached.saturating_mul(SHORT) < prompt;
            let counted = if is_short { 0 } else { cached };
            let missing = number(prompt.saturating_sub(counted));
            return around.load(load) + weight * missing * around.travel();
        }
        let overlap = weight * number(cached);
        // The order of the operations is that of Dynamo's scorers: it rounds alike, so equal stays equal.
        let before = match self.form {
            Form::Subtracted => number(load),
            Form::Missing | Form::BelowPeak => number(load) + weight * number(prompt),
        };
        (before - overlap).max(0.0)
    }
}

impl Surroundings {
    /// Those in which neither counts.
    pub(crate) const NONE: Self = Self {
        peak: 1.0,
        distance: 0.0,
    };

    /// What a load of these blocks costs.
    #[inline]
    fn load(self, blocks: usize) -> f64 {
        let full = (number(blocks) / self.peak).powi(POWER);
        self.peak / f64::from(POWER) * full
    }

    /// What a block that travels costs, beside its weight.
    #[inline]
    fn travel(self) -> f64 {
        1.0 + APART * self.distance
    }
}

/// Blocks of load in a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadTerm {
    /// Blocks with this request booked.
    pub blocks: usize,
    /// Whether that is known of this rank; else it is assumed, see [`Candidate::load`].
    pub is_known: bool,
}

impl LoadTerm {
    pub(crate) const fn known(blocks: usize) -> Self {
        let is_known = true;
        Self { blocks, is_known }
    }

    pub(crate) const fn assumed(blocks: usize) -> Self {
        let is_known = false;
        Self { blocks, is_known }
    }
}

impl fmt::Display for LoadTerm {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.blocks)?;
        let assumed = if self.is_known { "" } else { " (assumed)" };
        write!(out, "{assumed}")
    }
}

/// What a cost in blocks is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockTerms {
    /// Formula and weight.
    pub by: BlockCost,
    /// Load.
    pub load: LoadTerm,
    /// Blocks of the prompt that are cached there.
    pub cached_blocks: usize,
    /// All blocks of the prompt, the last one begun among them.
    pub prompt_blocks: usize,
    /// What else the cost depends on; `None`: the formula needs nothing else.
    pub around: Option<Surroundings>,
}

impl BlockTerms {
    /// Blocks.
    pub fn cost(&self) -> f64 {
        let around = self.around.unwrap_or(Surroundings::NONE);
        let load = self.load.blocks;
        self.by
            .of(load, self.cached_blocks, self.prompt_blocks, around)
    }
}

impl fmt::Display for BlockTerms {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (cost, weight, load) = (self.cost(), self.by.weight.get(), self.load);
        let (cached, all) = (self.cached_blocks, self.prompt_blocks);
        let missing = all.saturating_sub(cached);
        match self.by.form {
            Form::Subtracted => write!(
                out,
                "{cost} = max(0, load {load} - {weight} x {cached} of {all} cached)"
            ),
            Form::Missing => write!(
                out,
                "{cost} = load {load} + {weight} x {missing} of {all} missing"
            ),
            Form::BelowPeak => {
                let around = self.around.unwrap_or(Surroundings::NONE);
                write!(
                    out,
                    "{cost:.3} = {:.3} for load {load} of peak {:.0} + {weight} x {missing} of {all} missing x {:.3}",
                    around.load(load.blocks),
                    around.peak,
                    around.travel(),
                )
            }
        }
    }
}

/// Rates that turn the terms of a pair into milliseconds. Configured; nothing is measured here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairCost {
    /// Prompt tokens that a prefill worker computes in a millisecond.
    pub prefill_tokens_per_ms: Rate,
    /// Bytes that a block takes on the link, over all layers and ranks of tensor parallelism.
    pub block_bytes: u64,
    /// What a block of decode load costs each token of the request, over its output: milliseconds. 0: decode
    /// load does not count.
    pub decode_ms_per_block: Weight,
}

impl PairCost {
    pub(crate) fn terms(
        &self,
        (prefill, queued): (&PrefillCandidate, QueueTerm),
        (decode, load): (&Candidate, LoadTerm),
        link_bytes_per_ms: Rate,
        shape: PromptShape,
    ) -> PairTerms {
        let uncached = prefill.uncached_tokens(shape);
        let tokens = queued.tokens as f64 + uncached as f64;
        let missing = decode.missing_blocks(shape);
        let bytes = missing as f64 * self.block_bytes as f64;
        PairTerms {
            prefill: prefill.of,
            queued,
            uncached_tokens: uncached,
            missing_blocks: missing,
            cached_blocks: decode.cached_blocks,
            load,
            prefill_ms: tokens / self.prefill_tokens_per_ms.get(),
            transfer_ms: bytes / link_bytes_per_ms.get(),
            decode_ms: load.blocks as f64 * self.decode_ms_per_block.get(),
        }
    }
}

/// Tokens that wait at a prefill worker, in a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueTerm {
    /// Prompt tokens of other requests.
    pub tokens: usize,
    /// Whether that is known of this rank; else it is assumed, see [`PrefillCandidate::queued_tokens`].
    pub is_known: bool,
}

impl QueueTerm {
    pub(crate) const fn known(tokens: usize) -> Self {
        let is_known = true;
        Self { tokens, is_known }
    }

    pub(crate) const fn assumed(tokens: usize) -> Self {
        let is_known = false;
        Self { tokens, is_known }
    }
}

/// What the cost of a pair is made of.
///
/// The three add up though prefill and transfer of different layers may run at once: it is an upper bound
/// for every pair alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairTerms {
    /// The prefill worker.
    pub prefill: WorkerRank,
    /// What waits at the prefill worker.
    pub queued: QueueTerm,
    /// Tokens of this prompt that the prefill worker computes.
    pub uncached_tokens: usize,
    /// Blocks that travel.
    pub missing_blocks: usize,
    /// Blocks that the decode worker has.
    pub cached_blocks: usize,
    /// Load of the decode worker.
    pub load: LoadTerm,
    /// Milliseconds until the prefill worker is done.
    pub prefill_ms: f64,
    /// Milliseconds on the link.
    pub transfer_ms: f64,
    /// Milliseconds that the decode worker's load costs.
    pub decode_ms: f64,
}

impl PairTerms {
    /// Milliseconds.
    pub fn cost(&self) -> f64 {
        self.prefill_ms + self.transfer_ms + self.decode_ms
    }
}

impl fmt::Display for PairTerms {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queued = self.queued;
        let assumed = if queued.is_known { "" } else { " (assumed)" };
        write!(
            out,
            "prefill on {}: {:.3} ms = prefill {:.3} ({}{assumed} + {} tokens) + transfer {:.3} ({} \
             blocks, {} cached) + decode {:.3} (load {})",
            self.prefill,
            self.cost(),
            self.prefill_ms,
            queued.tokens,
            self.uncached_tokens,
            self.transfer_ms,
            self.missing_blocks,
            self.cached_blocks,
            self.decode_ms,
            self.load,
        )
    }
}
