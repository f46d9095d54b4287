// SPDX-License-Identifier: Apache-2.0

//! The router: index, trust, bookings.

use std::time::Duration;

use fastrand::Rng;
use kvdelta_indexer::{Index, Millis, Prompt, StaleClaim, TrustBook, WorkerRank};
use kvdelta_overlap::{
    Asked, Candidate, CoolDown, Fleet, Load, PrefillCandidate, PromptShape, Query, Rate, Sizes,
};

use super::feed::{Feed, block_hash};
use super::policy::{PairRates, Picked, Policy, Question};
use super::settings::{BadSetting, Settings};
use crate::trace::{Node, Request, Trace};

/// Makes far numbers of near seeds, odd, so that no two become one: a draw is by the seed and the request's number, bit
/// by bit, and near seeds would share the draws of neighbours.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// What the router knows.
#[derive(Debug)]
pub(crate) struct Router {
    policy: Policy,
    seed: u64,
    rates: Option<PairRates>,
    index: Index,
    trust: TrustBook,
    fleet: Fleet,
    sizes: Sizes,
    feed: Feed,
    cool_downs: Vec<Option<CoolDown>>,
    /// Workers about which a report of a stale claim is in force.
    lowered: Vec<usize>,
    /// Blocks that are booked on each worker.
    loads: Vec<usize>,
    /// Choices for which every worker was refused.
    pub(crate) overloaded: u64,
}

/// Which decode worker a request goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Routed {
    pub(crate) decode: usize,
    /// Where the policy chooses that too.
    pub(crate) prefill: Option<usize>,
    pub(crate) picked: Picked,
}

impl Router {
    pub(crate) fn new(
        settings: &Settings,
        trace: &Trace,
        policy: Policy,
    ) -> Result<Self, BadSetting> {
        let index = Index::new(trace.block_size());
        let trust = TrustBook::new(Duration::MAX);
        let ranks = (0..settings.decode)
            .zip(0..)
            .map(|(_, number)| WorkerRank::new(number, 0));
        let fleet = Fleet::new(ranks.map(|of| {
            index.admit(of);
            // All of them have told everything from the start on.
            trust.admit(of, Millis(0));
            trust.heard(of, 0, Millis(0));
            trust.caught_up(of, Millis(0));
            let candidate = Candidate::new(of).with_load(Load::new(0));
            candidate.with_capacity(settings.capacity)
        }));
        let rates = match policy {
            Policy::Pair(_) => Some(pair_rates(settings)?),
            _ => None,
        };
        Ok(Self {
            policy,
            seed: settings.seed.wrapping_mul(SPREAD),
            rates,
            index,
            trust,
            fleet,
            sizes: Sizes::default(),
            feed: Feed::new(settings.event_delay(), settings.event_loss, settings.seed),
            cool_downs: vec![None; settings.decode],
            lowered: Vec::new(),
            loads: vec![0; settings.decode],
            overloaded: 0,
        })
    }

    /// Chooses the decode worker of a request, or follows another choice, and books its blocks there.
    pub(crate) fn route(
        &mut self,
        trace: &Trace,
        number: u32,
        prefill: &[PrefillCandidate],
        follow: Option<usize>,
        now: Duration,
    ) -> Routed {
        self.feed.deliver(&self.index, trace, now);
        let request = &trace.requests()[number as usize];
        let shape = shape(request, trace);
        let looks = !self.policy.is_late();
        let path: &[Node] = if looks { trace.path(request) } else { &[] };
        let hashes = path.iter().map(|node| block_hash(*node)).collect();
        let mut prompt = Prompt::hashed(hashes, trace.block_size());
        let at = Millis(0).plus(now);
        self.raise(at);
        let question = Question {
            query: Query {
                index: &self.index,
                trust: &self.trust,
            },
            fleet: &mut self.fleet,
            prompt: &mut prompt,
            prefill,
            rates: self.rates,
            asked: Asked {
                shape,
                busy: None,
                size: self.sizes.place(shape.blocks()),
                tie_break: Rng::with_seed(self.seed ^ u64::from(number)).u64(..),
            },
            now: at,
        };
        let picked = match follow {
            Some(decode) => self.policy.follow(question, rank(decode)),
            None => self.policy.pick(question).ok(),
        };
        let picked = picked.unwrap_or_else(|| {
            self.overloaded += 1;
            let loads = self.loads.iter().zip(0..);
            let least = loads.min_by_key(|(load, _)| **load);
            let place = least.map_or(0, |(_, place)| place);
            Picked::refused(WorkerRank::new(place, 0))
        });
        let place = |of: WorkerRank| usize::try_from(of.worker.0).unwrap_or_default();
        let decode = place(picked.decode);
        self.sizes.saw(shape.blocks());
        self.loads[decode] += shape.blocks();
        self.tell(decode);
        Routed {
            decode,
            prefill: picked.prefill.map(place),
            picked,
        }
    }

    /// A request of `blocks` blocks has ended.
    pub(crate) fn release(&mut self, decode: usize, blocks: usize) {
        self.loads[decode] -= blocks;
        self.tell(decode);
    }

    fn tell(&mut self, decode: usize) {
        if let Some(candidate) = self.fleet.candidate_mut(rank(decode)) {
            candidate.load = Some(Load::new(self.loads[decode]));
        }
    }

    /// A worker has the whole blocks of a request, `from` one on, that it had not before.
    pub(crate) fn stored(
        &mut self,
        trace: &Trace,
        decode: usize,
        new: (u32, usize),
        now: Duration,
    ) {
        if !self.policy.is_late() {
            let of = rank(decode);
            self.feed.stored(&self.index, trace, of, new, now);
        }
    }

    /// A worker threw blocks out; `gone` is emptied.
    pub(crate) fn removed(&mut self, decode: usize, gone: &mut Vec<Node>, now: Duration) {
        if self.policy.is_late() {
            gone.clear();
        } else if !gone.is_empty() {
            self.feed.removed(&self.index, rank(decode), gone, now);
        }
    }

    /// A claim that was made at `claimed` was stale: none of this worker for a while.
    pub(crate) fn stale(
        &mut self,
        decode: usize,
        (said, had): (usize, usize),
        claimed: Duration,
        now: Duration,
    ) {
        let (claimed, now) = (Millis(0).plus(claimed), Millis(0).plus(now));
        let Some(cool_down) = CoolDown::after(self.cool_downs[decode], claimed, now) else {
            return;
        };
        self.cool_downs[decode] = Some(cool_down);
        let blocks = |count| u32::try_from(count).unwrap_or(u32::MAX);
        let said = StaleClaim {
            said_blocks: blocks(said),
            had_blocks: blocks(had),
            missing: None,
        };
        self.trust.report_stale(rank(decode), said, now);
        if !self.lowered.contains(&decode) {
            self.lowered.push(decode);
        }
    }

    /// A claim that was made at `claimed` held.
    pub(crate) fn held(&mut self, decode: usize, claimed: Duration) {
        if let Some(cool_down) = &mut self.cool_downs[decode] {
            cool_down.held(Millis(0).plus(claimed));
        }
    }

    /// Lets claims be made again where it is time for them.
    fn raise(&mut self, now: Millis) {
        let (trust, cool_downs) = (&self.trust, &self.cool_downs);
        self.lowered.retain(|decode| {
            let is_over = cool_downs[*decode].is_none_or(|one| one.is_over(now));
            if is_over && let Some(said) = trust.stale_report(rank(*decode)) {
                trust.settle_stale(rank(*decode), said, now);
            }
            !is_over
        });
    }

    /// Lets the index hear what is still on its way.
    #[cfg(test)]
    pub(crate) fn hear_all(&mut self, trace: &Trace) {
        self.feed.deliver(&self.index, trace, Duration::MAX);
    }

    #[cfg(test)]
    pub(crate) fn index(&self) -> &Index {
        &self.index
    }

    /// Events that were lost, and that the index refused since it lacks what stands before.
    pub(crate) fn events(&self) -> (u64, u64) {
        (self.feed.lost, self.feed.refused)
    }
}

fn rank(decode: usize) -> WorkerRank {
    WorkerRank::new(decode as u64, 0)
}

/// The sizes of a request's prompt.
pub(crate) fn shape(request: &Request, trace: &Trace) -> PromptShape {
    PromptShape {
        prompt_tokens: request.prompt_tokens as usize,
        block_size: trace.block_size(),
        drops_last_block: false,
    }
}

fn pair_rates(settings: &Settings) -> Result<PairRates, BadSetting> {
    let rate = |per_s: f64| Rate::try_from(per_s / 1000.0).map_err(|_| BadSetting::InfinitePair);
    Ok(PairRates {
        prefill_tokens_per_ms: rate(settings.prefill_tokens_per_s)?,
        link_bytes_per_ms: rate(settings.link_bytes_per_s())?,
        block_bytes: settings.block_bytes,
    })
}
