//! The cheapest candidate: ties, refusals, the reason given.

use std::cmp::Ordering;
use std::fmt;

use kvdelta_indexer::{Standing, WorkerRank};
use thiserror::Error;

use crate::candidate::{Candidate, PrefillCandidate, Refusal, Refusals};
use crate::claimable::{Cached, Claimable, NoClaim, PromptShape, claimable};
use crate::cost::{
    BlockCost, BlockTerms, Form, LoadTerm, PairCost, PairTerms, Peak, QueueTerm, Rate, Share,
    Surroundings,
};
use crate::sizes::Place;

/// What a choice is asked about, besides its candidates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Asked {
    /// Sizes of the prompt.
    pub shape: PromptShape,
    /// The busy line: a rank whose blocks in use are more than this share of its cache is refused, as Dynamo's
    /// worker monitor does it (`active_decode_blocks_threshold`). `None`: there is none.
    pub busy: Option<Share>,
    /// The place of its size, by [`Sizes`](crate::Sizes), for [`Form::BelowPeak`]. `None`: no rank is nearer to it.
    pub size: Option<Place>,
    /// A number that differs from request to request, best a random one. Among equal costs it decides, so each
    /// of them has the same chance.
    pub tie_break: u64,
}

/// A candidate and what it costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Priced<T> {
    /// What it has cached.
    pub cached: Cached,
    /// Why it costs that.
    pub terms: T,
}

impl<T> Priced<T> {
    /// Which decode rank.
    pub fn of(&self) -> WorkerRank {
        self.cached.of
    }
}

/// The chosen decode rank, and what there was to choose from.
///
/// Its `Display` is one line that explains it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice<T> {
    /// The cheapest.
    pub best: Priced<T>,
    /// The cheapest of the others; `None`: there was no other.
    pub runner_up: Option<Priced<T>>,
    /// Candidates that cost the same as the best, itself among them.
    pub cheapest: usize,
    /// Decode candidates that might have been chosen.
    pub allowed: usize,
    /// Decode candidates that might not.
    pub refused: Refusals,
}

impl<T> Choice<T> {
    /// What may be claimed of the best, given how far its rank is trusted.
    ///
    /// # Errors
    /// Why nothing, see [`NoClaim`].
    pub fn claim(
        &self,
        standing: Option<Standing>,
        shape: PromptShape,
    ) -> Result<Claimable, NoClaim> {
        claimable(self.best.cached, standing, shape)
    }
}

impl<T: fmt::Display> fmt::Display for Choice<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "decode on {}: {}", self.best.of(), self.best.terms)?;
        match &self.runner_up {
            Some(next) => write!(out, "; next {}: {}", next.of(), next.terms)?,
            None => write!(out, "; no other")?,
        }
        if self.cheapest > 1 {
            write!(out, "; one of {} equal", self.cheapest)?;
        }
        write!(out, "; {} allowed, {}", self.allowed, self.refused)
    }
}

/// Why no decode rank was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NoChoice {
    /// There are none.
    #[error("there is no decode worker to choose from")]
    NoCandidates,
    /// None of them may be chosen.
    #[error("no decode worker may be chosen: {0}")]
    AllRefused(Refusals),
    /// None of the prefill workers may be chosen; of a pair alone.
    #[error("no prefill worker may be chosen: {0}")]
    NoPrefill(Refusals),
}

impl NoChoice {
    fn of(refused: Refusals) -> Self {
        match refused.total() {
            0 => Self::NoCandidates,
            _ => Self::AllRefused(refused),
        }
    }
}

/// The cheapest decode rank by a cost in blocks.
///
/// Books nothing: two calls with the same arguments choose the same, in whatever order the candidates stand.
///
/// # Errors
/// [`NoChoice`], if there is none that may be chosen.
pub fn choose<'a>(
    candidates: &'a [Candidate],
    cost: BlockCost,
    asked: Asked,
) -> Result<Choice<BlockTerms>, NoChoice> {
    let (prompt, busy) = (asked.shape.blocks(), asked.busy);
    let mut refused = Refusals::default();
    let mut leading = Leading::new(asked.tie_break);
    let peak = (cost.form == Form::BelowPeak).then(|| peak(candidates, prompt, busy));
    let around = |candidate: &Candidate| {
        let (peak, is_even) = peak?;
        let places = candidate.place.zip(asked.size).filter(|_| !is_even);
        let distance = places.map_or(0.0, |(rank, size)| rank.distance(size));
        Some(Surroundings { peak, distance })
    };
    let seen = |candidate: &'a Candidate, load: LoadTerm| {
        let around = around(candidate).unwrap_or(Surroundings::NONE);
        Seen {
            of: candidate.of,
            cost: cost.of(load.blocks, candidate.cached_blocks, prompt, around),
            what: (candidate, load),
        }
    };
    let (mut least, mut unknown) = (usize::MAX, 0);
    for candidate in candidates {
        if let Some(why) = candidate.refusal_of(prompt, busy) {
            refused.count(why);
        } else if let Some(load) = candidate.load {
            let load = load.with_prompt(prompt);
            least = least.min(load);
            leading.see(seen(candidate, LoadTerm::known(load)));
        } else {
            unknown += 1;
        }
    }
    if unknown > 0 {
        let is_any_known = refused.total() + unknown < candidates.len();
        let load = LoadTerm::assumed(if is_any_known { least } else { prompt });
        let without = candidates.iter().filter(|one| one.load.is_none());
        for candidate in without.filter(|one| one.refusal_of(prompt, busy).is_none()) {
            leading.see(seen(candidate, load));
        }
    }
    let choice = leading.choice(candidates.len(), refused, |(candidate, load)| Priced {
        cached: candidate.cached(),
        terms: BlockTerms {
            by: cost,
            load,
            cached_blocks: candidate.cached_blocks,
            prompt_blocks: prompt,
            around: around(candidate),
        },
    });
    choice.ok_or(NoChoice::of(refused))
}

/// Of those that may be chosen, see [`Peak::with_prompt`]. One with an unknown load does not count.
fn peak(candidates: &[Candidate], prompt: usize, busy: Option<Share>) -> (f64, bool) {
    let mut peak = Peak::default();
    let may = candidates
        .iter()
        .filter(|one| one.refusal_of(prompt, busy).is_none());
    may.filter_map(|one| one.load)
        .for_each(|load| peak.see(load.active_blocks));
    peak.with_prompt(prompt)
}

/// The cheapest pair of a prefill and a decode rank, in milliseconds.
///
/// `link` says how many bytes a millisecond go from the one to the other; `None`: the two have no link, as
/// where they are in different topology domains. The runner-up is the cheapest pair of another decode rank.
///
/// # Errors
/// [`NoChoice`], if there is no pair that may be chosen.
pub fn choose_pair(
    prefill: &[PrefillCandidate],
    decode: &[Candidate],
    cost: PairCost,
    link: impl Fn(WorkerRank, WorkerRank) -> Option<Rate>,
    asked: Asked,
) -> Result<Choice<PairTerms>, NoChoice> {
    let shape = asked.shape;
    let may = |candidate: &&Candidate| candidate.refusal(shape, asked.busy).is_none();
    let loads = decode.iter().filter(may).filter_map(|one| one.load);
    let least_load = loads.map(|load| load.with_request(shape)).min();
    let assumed_load = LoadTerm::assumed(least_load.unwrap_or(shape.blocks()));
    let allowed = prefill.iter().filter(|one| one.refused.is_none());
    let least_queue = allowed.clone().filter_map(|one| one.queued_tokens).min();
    let assumed_queue = QueueTerm::assumed(least_queue.unwrap_or(shape.prompt_tokens));

    let mut refused = Refusals::default();
    let mut leading = Leading::new(asked.tie_break);
    for decode in decode {
        if let Some(why) = decode.refusal(shape, asked.busy) {
            refused.count(why);
            continue;
        }
        let load = decode.load.map_or(assumed_load, |load| {
            LoadTerm::known(load.with_request(shape))
        });
        let mut best = Leading::new(asked.tie_break);
        for prefill in allowed.clone() {
            let Some(link) = link(prefill.of, decode.of) else {
                continue;
            };
            let queued = prefill
                .queued_tokens
                .map_or(assumed_queue, QueueTerm::known);
            let terms = cost.terms((prefill, queued), (decode, load), link, shape);
            best.see(Seen {
                of: prefill.of,
                cost: terms.cost(),
                what: terms,
            });
        }
        match best.best {
            Some(pair) => leading.see(Seen {
                of: decode.of,
                cost: pair.seen.cost,
                what: (decode, pair.seen.what),
            }),
            None => refused.count(Refusal::NoLink),
        }
    }
    if let Some(choice) = leading.choice(decode.len(), refused, |(candidate, terms)| Priced {
        cached: candidate.cached(),
        terms,
    }) {
        return Ok(choice);
    }
    let mut no_prefill = Refusals::default();
    let all_refused = prefill.iter().filter_map(|one| one.refused);
    all_refused.for_each(|why| no_prefill.count(why));
    let is_prefill = decode.iter().any(|one| may(&one)) && no_prefill.total() == prefill.len();
    Err(if is_prefill {
        NoChoice::NoPrefill(no_prefill)
    } else {
        NoChoice::of(refused)
    })
}

/// The two cheapest of what was seen, whatever the order it came in.
struct Leading<T> {
    tie_break: u64,
    best: Option<Drawn<T>>,
    next: Option<Drawn<T>>,
    /// What the second costs; infinite while there is none.
    bound: f64,
    /// How many cost what the best costs.
    cheapest: usize,
}

#[derive(Clone, Copy)]
struct Seen<T> {
    of: WorkerRank,
    cost: f64,
    what: T,
}

/// One of the cheapest, with what it draws among equals.
#[derive(Clone, Copy)]
struct Drawn<T> {
    seen: Seen<T>,
    lot: u64,
}

impl<T: Copy> Leading<T> {
    fn new(tie_break: u64) -> Self {
        Self {
            tie_break,
            best: None,
            next: None,
            bound: f64::INFINITY,
            cheapest: 0,
        }
    }

    #[inline]
    fn see(&mut self, seen: Seen<T>) {
        // Most cost more.
        if seen.cost <= self.bound {
            self.see_near(seen);
        }
    }

    fn see_near(&mut self, seen: Seen<T>) {
        let lot = lot(self.tie_break, seen.of);
        let drawn = Drawn { seen, lot };
        let Some(best) = &self.best else {
            self.best = Some(drawn);
            self.cheapest = 1;
            return;
        };
        match seen.cost.total_cmp(&best.seen.cost) {
            Ordering::Less => self.cheapest = 1,
            Ordering::Equal => self.cheapest += 1,
            Ordering::Greater => {}
        }
        if drawn.is_before(best) {
            self.next = self.best.replace(drawn);
        } else if self.next.is_none_or(|next| drawn.is_before(&next)) {
            self.next = Some(drawn);
        }
        self.bound = self.next.map_or(f64::INFINITY, |next| next.seen.cost);
    }

    fn choice<P>(
        self,
        candidates: usize,
        refused: Refusals,
        priced: impl Fn(T) -> Priced<P>,
    ) -> Option<Choice<P>> {
        Some(Choice {
            best: priced(self.best?.seen.what),
            runner_up: self.next.map(|next| priced(next.seen.what)),
            cheapest: self.cheapest,
            allowed: candidates.saturating_sub(refused.total()),
            refused,
        })
    }
}

impl<T> Drawn<T> {
    #[inline]
    fn is_before(&self, other: &Self) -> bool {
        let order = self.seen.cost.total_cmp(&other.seen.cost);
        let lot = |one: &Self| (one.lot, one.seen.of);
        order.then_with(|| lot(self).cmp(&lot(other))).is_lt()
    }
}

/// What a rank draws among equals: it depends on nothing else, so not on the order of the candidates.
///
/// Two folded products instead of a hash of bytes: where all are equal, as in an idle fleet, each draws.
fn lot(tie_break: u64, of: WorkerRank) -> u64 {
    let rank = u64::from(of.rank.0);
    let first = folded(of.worker.0 ^ tie_break, 0x9e37_79b9_7f4a_7c15);
    folded(
        first ^ rank ^ tie_break.rotate_left(32),
        0xd6e8_feb8_6659_fd93,
    )
}

/// The two halves of a product, folded into one.
fn folded(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    let high = u64::try_from(product >> 64).unwrap_or_default();
    a.wrapping_mul(b) ^ high
}

#[cfg(test)]
mod tests;
