// SPDX-License-Identifier: Apache-2.0

//! Which requests are sent, what is done to each, and when engines are killed; from a seed. Pure.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;

use serde::Serialize;

use crate::fleet::BLOCK_SIZE;
use crate::workload::FIRST_WORD;

/// Longest prompt with its answer that the plan makes.
pub(crate) const LONGEST_TOKENS: usize = 960;
/// Tokens of an answer that is not cut short.
const OUTPUT_TOKENS: usize = 12;
/// Tokens of an answer whose client leaves in the middle of it.
const LONG_OUTPUT_TOKENS: usize = 120;
/// First token id that is not special in the test model, and the end of its vocabulary.
pub(crate) const WORDS: std::ops::Range<u32> = FIRST_WORD..4096;
/// Prefixes that requests without a fault share.
const SHARED_PREFIXES: usize = 8;

/// What is done to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// Other prompts push the whole claimed prefix out of decode's cache.
    EvictWhole,
    /// Other prompts push the end of the claimed prefix out.
    EvictTail,
    /// One block in the middle goes, which an engine's own order of eviction never does.
    EvictMiddle,
    /// The claim has a hash that is not prefill's.
    OtherHash,
    /// The claim is one block longer than what decode holds, as one that forgets EAGLE.
    TooLong,
    /// The claim is of a decode worker that never held the prompt.
    NeverHeld,
    /// The claim contradicts itself or is no claim.
    BadClaim,
    /// The same prompt again, which ends with a block.
    FullHit,
    /// Decode has one token more than prefill (CASES B19).
    OneMore,
    /// The decode leg comes late, within the lease.
    Late,
    /// The decode leg comes after the lease.
    BeyondLease,
    /// The decode leg with a cut offer goes to the other decode worker.
    OtherDecode,
    /// The router sees that the offer was cut for a worker that is gone, and asks again.
    Void,
    /// The decode leg with a cut offer goes to a worker with the stock connector.
    StockDecode,
    /// The decode leg is sent twice.
    Twice,
    /// The offer is changed on its way.
    BadOffer,
    /// Prefill never hears that its blocks were read.
    LostNotice,
    /// The client leaves before prefill answers.
    LeavesPrefill,
    /// The client leaves between the legs.
    LeavesBetween,
    /// The client leaves before the first token.
    LeavesDecode,
    /// The client leaves in the middle of the answer.
    LeavesStream,
    /// The prompt has a cache salt.
    Salt,
    /// The claim is of the same prompt with another salt.
    OtherSalt,
}

impl Fault {
    /// All, in the order of the table.
    pub(crate) const ALL: [Self; 24] = [
        Self::None,
        Self::EvictWhole,
        Self::EvictTail,
        Self::EvictMiddle,
        Self::OtherHash,
        Self::TooLong,
        Self::NeverHeld,
        Self::BadClaim,
        Self::FullHit,
        Self::OneMore,
        Self::Late,
        Self::BeyondLease,
        Self::OtherDecode,
        Self::Void,
        Self::StockDecode,
        Self::Twice,
        Self::BadOffer,
        Self::LostNotice,
        Self::LeavesPrefill,
        Self::LeavesBetween,
        Self::LeavesDecode,
        Self::LeavesStream,
        Self::Salt,
        Self::OtherSalt,
    ];

    /// How often it is drawn, against the others.
    const fn share(self) -> u32 {
        match self {
            Self::None => 24,
            Self::BeyondLease | Self::LeavesPrefill | Self::LeavesBetween => 2,
            _ => 3,
        }
    }

    /// Whether the engines in use allow it.
    pub(crate) fn fits(self, engines: Engines, home: usize) -> bool {
        let own = |decode: usize| engines.decode[decode] == Connector::Own;
        let pair = engines.prefill == Connector::Own && own(home);
        match self {
            Self::None
            | Self::FullHit
            | Self::Late
            | Self::LeavesPrefill
            | Self::LeavesBetween
            | Self::LeavesDecode
            | Self::LeavesStream
            | Self::Salt => true,
            Self::EvictWhole
            | Self::EvictTail
            | Self::EvictMiddle
            | Self::OtherHash
            | Self::TooLong
            | Self::NeverHeld
            | Self::BadClaim
            | Self::Void
            | Self::Twice
            | Self::BadOffer
            | Self::LostNotice
            | Self::OtherSalt
            // The stock decode engine asserts that it needs no block more than prefill has.
            | Self::OneMore => pair,
            Self::BeyondLease => pair && engines.short_lease,
            Self::OtherDecode => pair && own(1 - home),
            Self::StockDecode => pair && !own(1 - home),
        }
    }

    /// Whether the request before it has made decode hold the prompt's prefix.
    const fn is_warm(self) -> bool {
        !matches!(self, Self::None | Self::NeverHeld)
    }

    /// Whether nobody waits for the answer.
    pub(crate) const fn leaves(self) -> bool {
        matches!(
            self,
            Self::LeavesPrefill | Self::LeavesBetween | Self::LeavesDecode | Self::LeavesStream
        )
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::EvictWhole => "whole prefix evicted",
            Self::EvictTail => "tail of it evicted",
            Self::EvictMiddle => "a middle block evicted",
            Self::OtherHash => "hash not prefill's",
            Self::TooLong => "claim a block too long",
            Self::NeverHeld => "claim of what never was",
            Self::BadClaim => "claim without sense",
            Self::FullHit => "full hit, block-aligned",
            Self::OneMore => "decode one token longer",
            Self::Late => "decode leg late",
            Self::BeyondLease => "decode leg after the lease",
            Self::OtherDecode => "cut offer to another D",
            Self::Void => "void claim",
            Self::StockDecode => "cut offer to a stock D",
            Self::Twice => "offer used twice",
            Self::BadOffer => "offer without sense",
            Self::LostNotice => "notice lost",
            Self::LeavesPrefill => "client leaves in prefill",
            Self::LeavesBetween => "client leaves between",
            Self::LeavesDecode => "client leaves before text",
            Self::LeavesStream => "client leaves in the text",
            Self::Salt => "cache salt",
            Self::OtherSalt => "claim of another salt",
        })
    }
}

/// The connector of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Connector {
    /// kvdelta's, with the hooks of `tests/engines/fault_connector.py`.
    Own,
    /// vLLM's.
    Stock,
}

/// What the engines are at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Engines {
    pub(crate) prefill: Connector,
    pub(crate) decode: [Connector; 2],
    /// Whether prefill's leases are short.
    pub(crate) short_lease: bool,
}

impl Engines {
    /// At the start.
    pub(crate) const FIRST: Self = Self {
        prefill: Connector::Own,
        decode: [Connector::Own; 2],
        short_lease: false,
    };

    fn after(mut self, kill: Kill) -> Self {
        match kill.victim {
            Victim::Prefill => {
                self.prefill = kill.connector;
                self.short_lease = kill.short_lease;
            }
            Victim::Decode(index) => self.decode[index] = kill.connector,
        }
        self
    }
}

/// Which engine is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Victim {
    Prefill,
    Decode(usize),
}

/// A kill, and as what the engine comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Kill {
    pub(crate) victim: Victim,
    pub(crate) connector: Connector,
    pub(crate) short_lease: bool,
    /// Milliseconds after the last request of its segment was begun.
    pub(crate) after_ms: u64,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Its number in the run.
    pub(crate) index: usize,
    pub(crate) prompt: Vec<u32>,
    pub(crate) salt: Option<String>,
    pub(crate) output_tokens: usize,
    pub(crate) fault: Fault,
    /// Whole blocks of the prompt that the request before it, of the same salt or not, has left with decode.
    pub(crate) warm_blocks: usize,
    /// Whether the answer is streamed, where nothing speaks against it.
    pub(crate) stream: bool,
    /// For whatever the fault has to choose.
    pub(crate) draw: u64,
}

/// Requests that follow each other, of which the later ones need the earlier ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    /// The kill with this number comes when all jobs of this segment and before are begun.
    pub(crate) segment: usize,
    /// The decode worker that it goes to, unless that is dead.
    pub(crate) home: usize,
    pub(crate) steps: Vec<Step>,
}

impl Job {
    /// The fault that it is about.
    pub(crate) fn fault(&self) -> Fault {
        self.steps.last().map_or(Fault::None, |step| step.fault)
    }
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) jobs: Vec<Job>,
    /// Kill `k` comes after segment `k`.
    pub(crate) kills: Vec<Kill>,
}

impl Plan {
    /// All requests.
    pub(crate) fn steps(&self) -> impl Iterator<Item = &Step> {
        self.jobs.iter().flat_map(|job| &job.steps)
    }
}

/// Plans `requests` requests with `kills` kills spread over them.
pub(crate) fn plan(requests: usize, kills: usize, seed: u64) -> Plan {
    let mut random = fastrand::Rng::with_seed(seed);
    let kills: Vec<Kill> = (0..kills).map(|number| kill(number, &mut random)).collect();
    let shared: Vec<Vec<u32>> = (0..SHARED_PREFIXES)
        .map(|_| blocks(&mut random, 6..=14))
        .collect();
    let mut draw = Draw {
        random,
        shared,
        seen: HashMap::new(),
    };
    let segments = kills.len() + 1;
    let mut engines = Engines::FIRST;
    let mut jobs: Vec<Job> = Vec::new();
    let mut planned = 0;
    for segment in 0..segments {
        let end = requests * (segment + 1) / segments;
        // What the engines allow now comes in rounds, what was seldom so far first.
        let mut round: Vec<(Fault, usize)> = Vec::new();
        while planned < end {
            if round.is_empty() {
                round = draw.round(engines);
            }
            let (fault, home) = round.pop().unwrap_or((Fault::None, 0));
            *draw.seen.entry(fault).or_default() += 1;
            let steps = draw.steps(fault, planned, end - planned);
            planned += steps.len();
            jobs.push(Job {
                segment,
                home,
                steps,
            });
        }
        if let Some(kill) = kills.get(segment) {
            engines = engines.after(*kill);
        }
    }
    Plan { jobs, kills }
}

/// Kill `number`: in turns every engine as every connector, never two stock ones at once.
fn kill(number: usize, random: &mut fastrand::Rng) -> Kill {
    use Connector::{Own, Stock};
    use Victim::{Decode, Prefill};
    // vLLM's own decode engine reads blocks whose lease has ended, so none is there while leases are short.
    const TURNS: [(Victim, Connector, bool); 12] = [
        (Decode(1), Stock, false),
        (Decode(1), Own, false),
        (Prefill, Own, true),
        (Decode(0), Own, false),
        (Prefill, Own, false),
        (Decode(0), Stock, false),
        (Prefill, Own, false),
        (Decode(0), Own, false),
        (Prefill, Stock, false),
        (Decode(1), Own, false),
        (Prefill, Own, true),
        (Prefill, Own, false),
    ];
    let (victim, connector, short_lease) = TURNS[number % TURNS.len()];
    Kill {
        victim,
        connector,
        short_lease,
        after_ms: random.u64(0..400),
    }
}

fn words(random: &mut fastrand::Rng, count: usize) -> Vec<u32> {
    (0..count).map(|_| random.u32(WORDS)).collect()
}

fn blocks(random: &mut fastrand::Rng, count: std::ops::RangeInclusive<usize>) -> Vec<u32> {
    let count = random.usize(count);
    words(random, count * BLOCK_SIZE)
}

struct Draw {
    random: fastrand::Rng,
    shared: Vec<Vec<u32>>,
    seen: HashMap<Fault, u32>,
}

impl Draw {
    /// Every fault that fits, as often as its share says, in random order.
    fn round(&mut self, engines: Engines) -> Vec<(Fault, usize)> {
        let mut round = Vec::new();
        for fault in Fault::ALL {
            let first = self.random.usize(0..2);
            let home = [first, 1 - first]
                .into_iter()
                .find(|home| fault.fits(engines, *home));
            if let Some(home) = home {
                // A third of the shares: a slice of a run has to have them all.
                let shares = fault.share().div_ceil(3);
                round.extend((0..shares).map(|_| (fault, home)));
            }
        }
        self.random.shuffle(&mut round);
        let seen = |fault: Fault| self.seen.get(&fault).copied().unwrap_or_default();
        // Its end is taken first.
        round.sort_by_key(|(fault, _)| Reverse(seen(*fault) * 24 / fault.share()));
        round
    }

    /// The requests of one job, at most `room`.
    fn steps(&mut self, fault: Fault, first: usize, room: usize) -> Vec<Step> {
        let fault = if fault.is_warm() && room < 2 {
            Fault::None
        } else {
            fault
        };
        let prefix = if fault == Fault::None {
            let shared = self.random.usize(0..self.shared.len());
            self.shared[shared].clone()
        } else {
            blocks(&mut self.random, 6..=12)
        };
        let mut prefixes = [prefix.clone(), prefix];
        let mut tails = [5..=90, 5..=90].map(|tokens| {
            let tokens = self.random.usize(tokens);
            words(&mut self.random, tokens)
        });
        match fault {
            Fault::FullHit => {
                tails[0] = words(&mut self.random, BLOCK_SIZE);
                tails[1] = tails[0].clone();
            }
            // The block behind what is held has to be whole, and the last token behind that.
            Fault::TooLong => tails[1] = words(&mut self.random, BLOCK_SIZE + 5),
            Fault::OneMore => {
                // Prefill's prompt ends with a block, a token before, or anywhere; decode holds it, or its
                // beginning, or nothing.
                let ends = [BLOCK_SIZE, BLOCK_SIZE - 1, 17];
                let end = ends[self.random.usize(0..ends.len())];
                tails[1] = words(&mut self.random, end);
                match self.random.u8(0..3) {
                    0 => tails[0] = tails[1].clone(),
                    1 => {}
                    _ => prefixes[0] = blocks(&mut self.random, 6..=12),
                }
            }
            _ => {}
        }
        let salts = match fault {
            Fault::Salt => [Some("a"); 2],
            Fault::OtherSalt => [Some("a"), Some("b")],
            _ => [None; 2],
        };
        let warm = fault.is_warm().then_some(Fault::None);
        let faults = warm.into_iter().chain([fault]);
        let skip = usize::from(warm.is_none());
        let prompts = [0, 1].map(|number| [prefixes[number].as_slice(), &tails[number]].concat());
        let common = prompts[0].iter().zip(&prompts[1]);
        let common = common.take_while(|(one, other)| one == other).count();
        let warm_blocks = common.min(prompts[1].len() - 1) / BLOCK_SIZE;
        let of_steps = prompts.into_iter().zip(salts).skip(skip);
        faults
            .zip(of_steps)
            .enumerate()
            .map(|(number, (fault, (prompt, salt)))| Step {
                index: first + number,
                prompt,
                salt: salt.map(|salt| format!("{salt}{first}")),
                output_tokens: match fault {
                    Fault::LeavesStream => LONG_OUTPUT_TOKENS,
                    _ => OUTPUT_TOKENS,
                },
                fault,
                warm_blocks: if number == 0 { 0 } else { warm_blocks },
                stream: self.random.bool(),
                draw: self.random.u64(..),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_plan() {
        assert_eq!(plan(150, 3, 1), plan(150, 3, 1));
        assert_ne!(plan(150, 3, 1), plan(150, 3, 2));
    }

    #[test]
    fn requests_are_numbered_and_as_many_as_asked_for() {
        for (requests, kills) in [(0, 0), (1, 0), (150, 3), (2000, 20)] {
            let plan = plan(requests, kills, 7);
            let numbers: Vec<usize> = plan.steps().map(|step| step.index).collect();
            assert_eq!(numbers, (0..requests).collect::<Vec<_>>());
            assert_eq!(plan.kills.len(), kills);
            assert!(plan.jobs.is_sorted_by_key(|job| job.segment));
        }
    }

    #[test]
    fn a_slice_has_every_fault() {
        for seed in 0..20 {
            let plan = plan(150, 3, seed);
            let seen: HashSet<Fault> = plan.steps().map(|step| step.fault).collect();
            let missing: Vec<Fault> = Fault::ALL
                .into_iter()
                .filter(|fault| !seen.contains(fault))
                .collect();
            assert!(missing.is_empty(), "seed {seed}: {missing:?}");
        }
    }

    #[test]
    fn faults_fit_the_engines_of_their_segment_which_fit_each_other() {
        let plan = plan(2000, 40, 3);
        let mut engines = Engines::FIRST;
        let mut segment = 0;
        for job in &plan.jobs {
            while segment < job.segment {
                engines = engines.after(plan.kills[segment]);
                segment += 1;
                let stock = [engines.prefill, engines.decode[0], engines.decode[1]]
                    .into_iter()
                    .filter(|one| *one == Connector::Stock);
                assert!(stock.count() < 2, "{engines:?}");
                let stock_decode = engines.decode.contains(&Connector::Stock);
                assert!(!(engines.short_lease && stock_decode), "{engines:?}");
            }
            assert!(job.fault().fits(engines, job.home), "{job:?} {engines:?}");
        }
    }

    #[test]
    fn prompts_are_not_too_long() {
        for step in plan(2000, 20, 1).steps() {
            assert!(step.prompt.len() + step.output_tokens < LONGEST_TOKENS);
        }
    }
}
