// SPDX-License-Identifier: Apache-2.0

//! A trace through a fleet, event by event.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use kvdelta_indexer::Millis;
use kvdelta_transfer::{Choice, Recovery, RecoverySettings, Stale};

use super::balance::Balance;
use super::cache::Cache;
use super::decode::{DecodeWorker, Running};
use super::outcome::{Chosen, Outcome, Percentiles};
use super::policy::Policy;
use super::prefill::PrefillPool;
use super::router::{Router, shape};
use super::settings::{BadSetting, Settings, ms, span, taken};
use crate::trace::{Node, Request, Trace};

/// The way of a request back through the router to the same prefill worker, as kvdelta-transfer estimates it.
const DETOUR_MS: f64 = 20.0;
/// Rates of which kvdelta-transfer takes none that is larger.
const FASTEST: f64 = 1e15;

/// Sends all requests of a trace through a fleet. Equal arguments give equal outcomes.
///
/// With `follow` each goes to the decode worker that stands there at its place. Of the policy is asked only whether it
/// might have chosen so.
///
/// # Errors
/// [`BadSetting`], if the trace cannot go through, or the policy cannot say that.
pub(crate) fn run(
    trace: &Trace,
    settings: &Settings,
    policy: Policy,
    follow: Option<&[usize]>,
) -> Result<Outcome, BadSetting> {
    let settings = match policy {
        Policy::Pooled => settings.pooled(),
        _ => *settings,
    };
    settings.check(trace)?;
    if follow.is_some() && policy.cost().is_none() {
        return Err(BadSetting::CannotFollow(policy.name()));
    }
    let mut fleet = FleetRun::new(trace, settings, policy)?;
    fleet.follow = follow;
    fleet.take_all();
    Ok(fleet.outcome())
}

/// What happens next to a request or at a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// A prefill worker is done with a request.
    Prefilled(u32),
    /// A decode worker has what it lacked.
    Complete(u32),
    /// The first of a worker's running requests ends, if what was said holds still.
    Ends { decode: usize, said: u32 },
}

/// A step at its time; of equal times, that which was said first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at: Duration,
    order: u64,
    step: Step,
}

/// A request on its way.
#[derive(Clone, Copy, Debug, Default)]
struct Leg {
    prefill: usize,
    /// `None`: not chosen yet.
    decode: Option<usize>,
    claimed: usize,
    /// When the decode worker was booked.
    booked: Duration,
    /// When it got the request, for the first time.
    came: Option<Duration>,
    /// Blocks that the decode worker had.
    held: usize,
    /// Whether the decode worker computes what it lacks.
    recomputes: bool,
    /// Whether it waited for room.
    waited: bool,
    /// When decode began.
    began: Duration,
}

struct FleetRun<'a> {
    trace: &'a Trace,
    settings: Settings,
    policy: Policy,
    follow: Option<&'a [usize]>,
    router: Router,
    prefill: PrefillPool,
    decode: Vec<DecodeWorker>,
    legs: Vec<Leg>,
    steps: BinaryHeap<Reverse<Due>>,
    order: u64,
    tally: Tally,
    gone: Vec<Node>,
}

#[derive(Debug, Default)]
struct Tally {
    moved_blocks: u64,
    saved_blocks: u64,
    recomputed_blocks: u64,
    hit_tokens: u64,
    claims: u64,
    claimed_blocks: u64,
    stale: u64,
    recomputed: u64,
    asked_again: u64,
    waited: u64,
    balance: Balance,
    ttft_ms: Vec<f64>,
    itl_ms: Vec<f64>,
    chosen: Vec<Chosen>,
}

impl<'a> FleetRun<'a> {
    fn new(trace: &'a Trace, settings: Settings, policy: Policy) -> Result<Self, BadSetting> {
        let recovery = Recovery::new(RecoverySettings {
            prefill_tokens_per_second: settings.prefill_tokens_per_s.min(FASTEST),
            decode_tokens_per_second: settings.recompute_tokens_per_s.min(FASTEST),
            link_bytes_per_second: settings.link_bytes_per_s().min(FASTEST),
            ..RecoverySettings::default()
        });
        let recovery = recovery.map_err(BadSetting::Recovery)?;
        let decode = (0..settings.decode).map(|_| DecodeWorker {
            cache: Cache::new(settings.capacity),
            waiting: VecDeque::new(),
            link_free_at: Duration::ZERO,
            recovery: recovery.clone(),
            running: Running::default(),
        });
        let requests = trace.requests().len();
        Ok(Self {
            trace,
            settings,
            policy,
            follow: None,
            router: Router::new(&settings, trace, policy)?,
            prefill: PrefillPool::new(&settings, trace.block_size().tokens()),
            decode: decode.collect(),
            legs: vec![Leg::default(); requests],
            steps: BinaryHeap::new(),
            order: 0,
            tally: Tally {
                balance: Balance::new(settings.decode),
                ttft_ms: Vec::with_capacity(requests),
                itl_ms: Vec::with_capacity(requests),
                chosen: vec![Chosen::default(); requests],
                ..Tally::default()
            },
            gone: Vec::new(),
        })
    }

    fn take_all(&mut self) {
        for (request, number) in self.trace.requests().iter().zip(0..) {
            self.until(request.at);
            self.arrive(number, request.at);
        }
        self.until(Duration::MAX);
    }

    fn request(&self, number: u32) -> &'a Request {
        &self.trace.requests()[number as usize]
    }

    fn leg(&mut self, number: u32) -> &mut Leg {
        &mut self.legs[number as usize]
    }

    fn at(&mut self, at: Duration, step: Step) {
        self.order += 1;
        let order = self.order;
        self.steps.push(Reverse(Due { at, order, step }));
    }

    /// Does all that is due by `end`.
    fn until(&mut self, end: Duration) {
        while let Some(Reverse(due)) = self.steps.peek()
            && due.at <= end
        {
            let Due { at, step, .. } = *due;
            self.steps.pop();
            match step {
                Step::Prefilled(number) => self.prefilled(number, at),
                Step::Complete(number) => self.complete(number, at),
                Step::Ends { decode, said } => self.ends(decode, said, at),
            }
        }
    }

    fn arrive(&mut self, number: u32, now: Duration) {
        let request = self.request(number);
        let path = self.trace.path(request);
        let chosen = if self.policy.is_late() {
            None
        } else {
            self.route(number, now)
        };
        let place = chosen.unwrap_or_else(|| self.prefill.soonest(request, path, now));
        self.leg(number).prefill = place;
        let done = self.prefill.compute(place, request, path, now);
        if done == now {
            self.prefilled(number, now);
        } else {
            self.at(done, Step::Prefilled(number));
        }
    }

    /// Chooses and books the decode worker. The prefill worker, where the policy chooses that too.
    fn route(&mut self, number: u32, now: Duration) -> Option<usize> {
        let request = self.request(number);
        let prefill = if self.policy.is_pair() {
            let path = self.trace.path(request);
            self.prefill.candidates(request, path, now)
        } else {
            &[]
        };
        let follow = self.follow.and_then(|all| all.get(number as usize));
        let routed = self
            .router
            .route(self.trace, number, prefill, follow.copied(), now);
        let (decode, picked) = (routed.decode, routed.picked);
        self.tally.claims += u64::from(picked.claimed > 0);
        self.tally.claimed_blocks += picked.claimed as u64;
        self.tally.chosen[number as usize] = Chosen {
            decode,
            cached: picked.cached,
            held: 0,
            cheapest: picked.cheapest,
            is_cheapest: picked.is_cheapest,
        };
        let leg = self.leg(number);
        leg.decode = Some(decode);
        leg.claimed = picked.claimed;
        leg.booked = now;
        routed.prefill
    }

    fn prefilled(&mut self, number: u32, now: Duration) {
        if self.leg(number).decode.is_none() {
            self.route(number, now);
        }
        let leg = &mut self.legs[number as usize];
        if let Some(decode) = leg.decode {
            if leg.came.is_none() {
                leg.came = Some(now);
                let request = &self.trace.requests()[number as usize];
                let blocks = request.blocks(self.trace.block_size());
                self.tally.balance.begin(decode, blocks);
            }
            self.decode[decode].waiting.push_back(number);
            self.admit(decode, now);
        }
    }

    /// Lets those in that have room, in the order in which they came.
    fn admit(&mut self, decode: usize, now: Duration) {
        while let Some(number) = self.decode[decode].waiting.front().copied() {
            if !self.look_up(decode, number, now) {
                let leg = self.leg(number);
                let is_new = !leg.waited;
                leg.waited = true;
                self.tally.waited += u64::from(is_new);
                return;
            }
            self.decode[decode].waiting.pop_front();
        }
    }

    /// The decode worker looks its own cache up, and begins to fetch or to compute what it lacks. `false`: it has no
    /// room.
    fn look_up(&mut self, decode: usize, number: u32, now: Duration) -> bool {
        let (request, trace) = (self.request(number), self.trace);
        let shape = shape(request, trace);
        let (blocks, path) = (shape.blocks(), trace.path(request));
        let reusable = path.get(..shape.most_blocks()).unwrap_or(path);
        let leg = self.legs[number as usize];
        let worker = &mut self.decode[decode];
        let held = worker.cache.held(reusable);
        let is_stale = held < leg.claimed;
        if is_stale {
            let block = self.settings.block_bytes;
            let missing = request.prompt_tokens as usize - held * trace.block_size().tokens();
            let stale = Stale {
                missing_tokens: missing as u64,
                context_tokens: request.prompt_tokens.into(),
                offered_bytes: (blocks - leg.claimed) as u64 * block,
                skipped_bytes: leg.claimed as u64 * block,
            };
            let choice = worker.recovery.choose(&stale, Millis(0).plus(now));
            let said = (leg.claimed, held);
            self.router.stale(decode, said, leg.booked, now);
            self.tally.stale += 1;
            // What has to wait for room finds out only once.
            self.leg(number).claimed = 0;
            if choice == Choice::AskAgain {
                self.tally.asked_again += 1;
                let asked = now.saturating_add(span(DETOUR_MS));
                let done = self.prefill.repeat(leg.prefill, request, asked);
                self.at(done, Step::Prefilled(number));
                return true;
            }
            self.tally.recomputed += 1;
            self.leg(number).recomputes = true;
        }
        let recomputes = self.leg(number).recomputes;
        let worker = &mut self.decode[decode];
        let missing = blocks - held;
        if !worker.cache.admit(&path[..held], missing, &mut self.gone) {
            return false;
        }
        self.router.removed(decode, &mut self.gone, now);
        let worker = &mut self.decode[decode];
        if leg.claimed > 0 && !is_stale {
            worker.recovery.confirmed(Millis(0).plus(now));
            self.router.held(decode, leg.booked);
        }
        let tokens = held * trace.block_size().tokens();
        self.tally.hit_tokens += tokens as u64;
        self.tally.saved_blocks += held as u64;
        let done = if recomputes {
            self.tally.recomputed_blocks += missing as u64;
            let missing = request.prompt_tokens as usize - tokens;
            now.saturating_add(taken(missing as f64, self.settings.recompute_tokens_per_s))
        } else {
            self.tally.moved_blocks += missing as u64;
            let bytes = missing as f64 * self.settings.block_bytes as f64;
            let from = worker.link_free_at.max(now);
            let done = from.saturating_add(taken(bytes, self.settings.link_bytes_per_s()));
            worker.link_free_at = done;
            done
        };
        self.leg(number).held = held;
        self.tally.chosen[number as usize].held = held;
        if done == now {
            self.complete(number, now);
        } else {
            self.at(done, Step::Complete(number));
        }
        true
    }

    /// All blocks of the prompt are there: decode begins.
    fn complete(&mut self, number: u32, now: Duration) {
        let request = self.request(number);
        let path = self.trace.path(request);
        let Leg { decode, held, .. } = *self.leg(number);
        let Some(decode) = decode else { return };
        let worker = &mut self.decode[decode];
        let shared = worker.cache.fill(&path[held..]);
        if held + shared < path.len() {
            let new = (number, held + shared);
            self.router.stored(self.trace, decode, new, now);
        }
        let blocks = request.blocks(self.trace.block_size());
        let tokens = request.output_tokens;
        let worker = &mut self.decode[decode];
        let settings = &self.settings;
        let before = worker.running.first();
        let first_ms = worker
            .running
            .begin(settings, now, number, (blocks, tokens));
        let ttft_ms = ms(now.saturating_sub(request.at)) + first_ms;
        let is_same = settings.itl_ms_per_block == 0.0 && worker.running.first() == before;
        self.tally.ttft_ms.push(ttft_ms);
        self.leg(number).began = now;
        if !is_same {
            self.say_next(decode);
        }
    }

    /// Says when the next request of a worker ends.
    fn say_next(&mut self, decode: usize) {
        let running = &mut self.decode[decode].running;
        if let Some(at) = running.next_end(&self.settings) {
            let said = running.said;
            self.at(at, Step::Ends { decode, said });
        }
    }

    fn ends(&mut self, decode: usize, said: u32, now: Duration) {
        let worker = &mut self.decode[decode];
        let first = worker
            .running
            .first()
            .filter(|_| worker.running.said == said);
        let Some(number) = first else { return };
        let request = &self.trace.requests()[number as usize];
        let blocks = request.blocks(self.trace.block_size());
        let path = self.trace.path(request);
        worker.running.end(&self.settings, now, blocks);
        worker.cache.release(path, blocks - path.len());
        self.router.release(decode, blocks);
        let leg = self.legs[number as usize];
        let time = now.saturating_sub(leg.came.unwrap_or(now));
        self.tally.balance.end(decode, blocks, time);
        if request.output_tokens > 1 {
            let decoded = ms(now.saturating_sub(leg.began));
            let itl_ms = decoded / f64::from(request.output_tokens);
            self.tally.itl_ms.push(itl_ms);
        }
        self.say_next(decode);
        self.admit(decode, now);
    }

    fn outcome(self) -> Outcome {
        let Tally {
            moved_blocks,
            saved_blocks,
            recomputed_blocks,
            hit_tokens,
            claims,
            claimed_blocks,
            stale,
            recomputed,
            asked_again,
            waited,
            balance,
            mut ttft_ms,
            mut itl_ms,
            chosen,
        } = self.tally;
        let bytes = |blocks: u64| blocks.saturating_mul(self.settings.block_bytes);
        let full_blocks = moved_blocks + saved_blocks + recomputed_blocks;
        let prompt_tokens = self.trace.prompt_tokens();
        // Of one cache for all, only what it saves means something.
        let is_fleet = self.policy != Policy::Pooled;
        let (events_lost, events_refused) = self.router.events();
        let times = |values: &mut Vec<f64>| match is_fleet {
            true => Percentiles::of(values),
            false => Percentiles::default(),
        };
        Outcome {
            requests: self.trace.requests().len(),
            full_bytes: bytes(full_blocks),
            moved_bytes: bytes(moved_blocks),
            saved_bytes: bytes(saved_blocks),
            recomputed_bytes: bytes(recomputed_blocks),
            saved_share: saved_blocks as f64 / full_blocks as f64,
            hit_share: hit_tokens as f64 / prompt_tokens as f64,
            claims,
            claimed_blocks,
            stale_claims: stale,
            recomputed,
            asked_again,
            imbalance: is_fleet.then(|| balance.imbalance()),
            least_imbalance: is_fleet.then(|| balance.least_imbalance()),
            busiest: balance.busiest().filter(|_| is_fleet),
            overloaded: self.router.overloaded,
            waited,
            events_lost,
            events_refused,
            ttft_ms: times(&mut ttft_ms),
            itl_ms: times(&mut itl_ms),
            chosen,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kvdelta_indexer::{BlockSize, WorkerRank};
    use kvdelta_overlap::Weight;

    use super::super::feed::engine_hash;
    use super::super::tests::settings;
    use super::*;
    use crate::trace::Synthetic;

    #[test]
    fn the_index_knows_what_the_workers_hold_and_all_room_is_given_back() {
        let trace = Synthetic {
            requests: 1500,
            per_second: 2.0,
            block_size: BlockSize::try_from(512).unwrap(),
            seed: 2,
        }
        .trace();
        let policies = [Policy::Overlap, Policy::Pair].map(|of| of(Weight::try_from(1.0).unwrap()));
        for (event_delay_ms, policy) in [0.0, 2500.0].into_iter().zip(policies) {
            let settings = Settings {
                capacity: 300,
                event_delay_ms,
                ..settings()
            };
            let mut fleet = FleetRun::new(&trace, settings, policy).unwrap();
            fleet.take_all();
            fleet.router.hear_all(&trace);
            for (worker, number) in fleet.decode.iter().zip(0..) {
                let index = fleet.router.index();
                index.check().unwrap();
                let known = index.held(WorkerRank::new(number, 0));
                let known: BTreeSet<_> = known.iter().map(|held| held.engine.0).collect();
                let held: BTreeSet<_> = worker
                    .cache
                    .nodes()
                    .map(|node| engine_hash(node).0)
                    .collect();
                assert!(held.len() > 100);
                assert_eq!(known, held, "{policy:?}");
                assert!(worker.cache.is_idle());
            }
        }
    }
}
