// SPDX-License-Identifier: Apache-2.0

//! How the decode worker of a request is chosen. All that is compared is a variant here; the choices
//! themselves are those of `kvdelta-overlap`, save for the references.

use std::cmp::Reverse;
use std::slice;

use kvdelta_indexer::{Millis, Prompt, WorkerRank};
use kvdelta_overlap::{
    Asked, BlockCost, BlockTerms, Cached, Candidate, Choice, Fleet, Form, NoChoice, PairCost,
    PrefillCandidate, Query, Rate, Weight, choose, choose_pair, claimable,
};

/// A way to choose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Policy {
    /// By load alone, when prefill is done: what Dynamo 1.6.1 does.
    Load,
    /// By load and overlap, before prefill.
    Overlap(Weight),
    /// As `Overlap`, by a cost in which load counts the more, the nearer a worker is to the busiest.
    BelowPeak(Weight),
    /// The pair of a prefill and a decode worker, by time; a block of load costs so many milliseconds.
    Pair(Weight),
    /// Reference: the longest prefix, whatever the load.
    Longest,
    /// Reference: the longest prefix among the workers whose load is at most 1.5 times the mean, if it is longer
    /// than a block; else the least load.
    LongestBelow,
    /// Reference: one cache as large as those of all workers.
    Pooled,
}

/// The line of [`Policy::LongestBelow`].
const BELOW: f64 = 1.5;
/// The shortest prefix, in blocks, that it follows. A first block that nearly all prompts share would else draw all
/// requests to the workers that happen to hold it.
const DRAWS: usize = 2;

/// What a policy may see.
#[derive(Debug)]
pub(crate) struct Question<'a> {
    pub(crate) query: Query<'a>,
    /// The decode workers; the one of number n is at place n.
    pub(crate) fleet: &'a mut Fleet,
    /// Empty where the policy does not look into the index.
    pub(crate) prompt: &'a mut Prompt<'static>,
    /// Empty where the policy does not choose the prefill worker.
    pub(crate) prefill: &'a [PrefillCandidate],
    /// The rates of a pair.
    pub(crate) rates: Option<PairRates>,
    pub(crate) asked: Asked,
    pub(crate) now: Millis,
}

/// What the cost of a pair is made of, besides its weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairRates {
    pub(crate) prefill_tokens_per_ms: Rate,
    pub(crate) link_bytes_per_ms: Rate,
    pub(crate) block_bytes: u64,
}

/// What was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Picked {
    pub(crate) decode: WorkerRank,
    /// Blocks that are claimed; 0: no claim.
    pub(crate) claimed: usize,
    /// `None`: the policy leaves it to the prefill pool.
    pub(crate) prefill: Option<WorkerRank>,
    /// Blocks that the index said of `decode`.
    pub(crate) cached: usize,
    /// Workers that cost as little as any, and whether `decode` is one of them.
    pub(crate) cheapest: usize,
    pub(crate) is_cheapest: bool,
}

impl Policy {
    /// Its name in options and reports.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Overlap(_) => "overlap",
            Self::BelowPeak(_) => "below-peak",
            Self::Pair(_) => "pair",
            Self::Longest => "longest",
            Self::LongestBelow => "longest-below",
            Self::Pooled => "pooled",
        }
    }

    /// Its weight, if it has one.
    pub(crate) const fn weight(self) -> Option<f64> {
        match self {
            Self::Overlap(weight) | Self::BelowPeak(weight) | Self::Pair(weight) => {
                Some(weight.get())
            }
            _ => None,
        }
    }

    /// Its name with its weight, if it has one.
    pub(crate) fn label(self) -> String {
        match self.weight() {
            Some(weight) => format!("{} {weight}", self.name()),
            None => self.name().to_owned(),
        }
    }

    /// Whether the decode worker is chosen when prefill is done, without a look into the index and without a claim.
    pub(crate) fn is_late(self) -> bool {
        match self {
            Self::Load | Self::Pooled => true,
            // With weight 0 all is as without kvdelta.
            Self::Overlap(weight) | Self::BelowPeak(weight) => weight.get() == 0.0,
            Self::Pair(_) | Self::Longest | Self::LongestBelow => false,
        }
    }

    /// Whether it chooses the prefill worker too.
    pub(crate) const fn is_pair(self) -> bool {
        matches!(self, Self::Pair(_))
    }

    /// Chooses.
    ///
    /// # Errors
    /// [`NoChoice`], if no worker may be chosen.
    pub(crate) fn pick(self, question: Question<'_>) -> Result<Picked, NoChoice> {
        let Question {
            query,
            fleet,
            prompt,
            prefill,
            rates,
            asked,
            now,
        } = question;
        let shape = asked.shape;
        match self {
            _ if self.is_late() => {
                let cost = blocks(Form::Missing, Weight::default());
                let choice = choose(fleet.candidates(), cost, asked)?;
                Ok(Picked::new(choice.best.cached, 0, choice.cheapest))
            }
            Self::Overlap(weight) | Self::BelowPeak(weight) => {
                let form = match self {
                    Self::BelowPeak(_) => Form::BelowPeak,
                    // The form that the patch series has.
                    _ => Form::Missing,
                };
                let answer = query.choose(prompt, fleet, blocks(form, weight), asked, now)?;
                let claimed = answer.claim.map_or(0, |claim| claim.blocks);
                let Choice { best, cheapest, .. } = answer.choice;
                Ok(Picked::new(best.cached, claimed, cheapest))
            }
            Self::Pair(weight) => {
                let Some(rates) = rates else {
                    return Err(NoChoice::NoCandidates);
                };
                query.overlaps(prompt, shape, fleet);
                let cost = PairCost {
                    prefill_tokens_per_ms: rates.prefill_tokens_per_ms,
                    block_bytes: rates.block_bytes,
                    decode_ms_per_block: weight,
                };
                let link = |_, _| Some(rates.link_bytes_per_ms);
                let choice = choose_pair(prefill, fleet.candidates(), cost, link, asked)?;
                let standing = query.trust.standing(choice.best.of(), now);
                let claim = choice.claim(standing, shape);
                let claimed = claim.map_or(0, |claim| claim.blocks);
                Ok(Picked {
                    prefill: Some(choice.best.terms.prefill),
                    ..Picked::new(choice.best.cached, claimed, choice.cheapest)
                })
            }
            _ => {
                query.overlaps(prompt, shape, fleet);
                let longest = self.longest(fleet.candidates(), asked.tie_break);
                let longest = longest.ok_or(NoChoice::NoCandidates)?;
                let standing = query.trust.standing(longest.of, now);
                let claim = claimable(longest.cached(), standing, shape);
                let claimed = claim.map_or(0, |claim| claim.blocks);
                Ok(Picked::new(longest.cached(), claimed, 1))
            }
        }
    }

    /// Its cost, if it chooses by one of each worker alone, in blocks.
    pub(crate) fn cost(self) -> Option<BlockCost> {
        match self {
            Self::Load => Some(blocks(Form::Missing, Weight::default())),
            Self::Overlap(weight) => Some(blocks(Form::Missing, weight)),
            _ => None,
        }
    }

    /// What comes of a choice that was made elsewhere, and whether this policy might have made it; `None`: it has no
    /// [`Policy::cost`], or there is no such worker.
    pub(crate) fn follow(self, question: Question<'_>, decode: WorkerRank) -> Option<Picked> {
        let Question {
            query,
            fleet,
            prompt,
            asked,
            now,
            ..
        } = question;
        let cost = self.cost()?;
        query.overlaps(prompt, asked.shape, fleet);
        let candidates = fleet.candidates();
        let one = candidates.iter().find(|one| one.of == decode)?;
        let best = choose(candidates, cost, asked).ok();
        let own = choose(slice::from_ref(one), cost, asked).ok();
        let standing = query.trust.standing(decode, now);
        let claim = claimable(one.cached(), standing, asked.shape);
        let claimed = claim.ok().filter(|_| !self.is_late());
        let price = |choice: &Choice<BlockTerms>| choice.best.terms.cost();
        Some(Picked {
            // Nothing is cheapest where no worker may be chosen.
            is_cheapest: own.is_some() && own.as_ref().map(price) == best.as_ref().map(price),
            ..Picked::new(
                one.cached(),
                claimed.map_or(0, |claim| claim.blocks),
                best.map_or(0, |best| best.cheapest),
            )
        })
    }

    /// The candidate with the longest prefix, of those that the policy looks at; of equal ones that with the least
    /// load.
    fn longest(self, candidates: &[Candidate], tie_break: u64) -> Option<&Candidate> {
        let load = |one: &Candidate| one.load.map_or(0, |load| load.active_blocks);
        let line = match self {
            Self::LongestBelow => {
                let all: usize = candidates.iter().map(load).sum();
                BELOW * all as f64 / candidates.len() as f64
            }
            _ => f64::INFINITY,
        };
        let lot = |one: &Candidate| {
            let mixed = (one.of.worker.0 ^ tie_break).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            mixed ^ (mixed >> 32)
        };
        let below = candidates.iter().filter(|one| load(one) as f64 <= line);
        let longest = below.min_by_key(|one| (Reverse(one.cached_blocks), load(one), lot(one)));
        let draws = |one: &&Candidate| self == Self::Longest || one.cached_blocks >= DRAWS;
        let least = || candidates.iter().min_by_key(|one| (load(one), lot(one)));
        longest.filter(draws).or_else(least)
    }
}

impl Picked {
    /// The cheapest of all workers, one of `cheapest`.
    const fn new(of: Cached, claimed: usize, cheapest: usize) -> Self {
        Self {
            decode: of.of,
            claimed,
            prefill: None,
            cached: of.blocks,
            cheapest,
            is_cheapest: true,
        }
    }

    /// Where every worker was refused.
    pub(crate) const fn refused(decode: WorkerRank) -> Self {
        Self {
            decode,
            claimed: 0,
            prefill: None,
            cached: 0,
            cheapest: 0,
            is_cheapest: false,
        }
    }
}

fn blocks(form: Form, weight: Weight) -> BlockCost {
    BlockCost { form, weight }
}
