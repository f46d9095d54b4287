// SPDX-License-Identifier: Apache-2.0

//! Made traces: conversations that begin with shared system prompts and grow by tails of their own.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use fastrand::Rng;
use kvdelta_indexer::BlockSize;

use super::requests::{Node, Trace};

/// System prompts; the n-th is chosen n times as seldom as the first.
const SYSTEM_PROMPTS: u32 = 12;
/// Tokens of the shortest; each is so much longer than the one before.
const SYSTEM_TOKENS: u32 = 1024;
/// Mean of what a user adds in a turn: tokens, of an exponential distribution as all means here.
const TURN_TOKENS: f64 = 3500.0;
/// Mean length of an answer: tokens.
const OUTPUT_TOKENS: f64 = 340.0;
/// Mean time between a request and the next one of its conversation: seconds.
const PAUSE_SECONDS: f64 = 60.0;
/// Mean number of turns.
const TURNS: f64 = 3.5;
/// A conversation ends before it has more tokens than this.
const LONGEST: u32 = 120_000;

/// How a trace is made. Equal settings make equal traces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Synthetic {
    pub(crate) requests: usize,
    /// Requests that come in a second, in the long run.
    pub(crate) per_second: f64,
    pub(crate) block_size: BlockSize,
    pub(crate) seed: u64,
}

/// A conversation between two requests.
#[derive(Debug)]
struct Conversation {
    /// Its whole blocks so far.
    path: Vec<Node>,
    tokens: u32,
}

struct Maker {
    rng: Rng,
    block: u32,
    next_node: u32,
}

impl Synthetic {
    /// The trace.
    pub(crate) fn trace(self) -> Trace {
        let mut trace = Trace::new(self.block_size);
        let mut maker = Maker {
            rng: Rng::with_seed(self.seed),
            block: self.block_size.into(),
            next_node: 0,
        };
        let systems: Vec<Conversation> = (1..=SYSTEM_PROMPTS)
            .map(|place| maker.grown(Vec::new(), 0, place * SYSTEM_TOKENS))
            .collect();
        let mut open: Vec<Option<Conversation>> = Vec::new();
        let mut closed: Vec<usize> = Vec::new();
        // When the next turn of which conversation comes.
        let mut turns: BinaryHeap<Reverse<(Duration, usize)>> = BinaryHeap::new();
        let mut beginning = Duration::ZERO;
        let between = TURNS / self.per_second;
        while trace.requests().len() < self.requests {
            let turn = turns.peek().map(|Reverse((at, _))| *at);
            let (now, place, spoken) = match turn.filter(|at| *at <= beginning) {
                Some(at) => {
                    let place = turns.pop().map_or(0, |Reverse((_, place))| place);
                    let Some(spoken) = open[place].take() else {
                        continue;
                    };
                    (at, place, spoken)
                }
                None => {
                    let place = closed.pop().unwrap_or_else(|| {
                        open.push(None);
                        open.len() - 1
                    });
                    let system = &systems[maker.system()];
                    let spoken = Conversation {
                        path: system.path.clone(),
                        tokens: system.tokens,
                    };
                    let now = beginning;
                    beginning += maker.seconds(between);
                    (now, place, spoken)
                }
            };
            let added = maker.tokens(TURN_TOKENS);
            let prompt = maker.grown(spoken.path, spoken.tokens, added);
            let output = maker.tokens(OUTPUT_TOKENS);
            trace.push(now, prompt.tokens, output, prompt.path.iter().copied());
            let goes_on = maker.rng.f64() * TURNS >= 1.0 && prompt.tokens < LONGEST;
            if goes_on {
                open[place] = Some(maker.grown(prompt.path, prompt.tokens, output));
                turns.push(Reverse((now + maker.seconds(PAUSE_SECONDS), place)));
            } else {
                closed.push(place);
            }
        }
        trace
    }
}

impl Maker {
    /// What `added` tokens make of a conversation. A block that was only begun has no number, so it gets one
    /// when it is whole.
    fn grown(&mut self, mut path: Vec<Node>, tokens: u32, added: u32) -> Conversation {
        let tokens = tokens.saturating_add(added).min(2 * LONGEST);
        let whole = (tokens / self.block) as usize;
        while path.len() < whole {
            path.push(Node(self.next_node));
            self.next_node = self.next_node.saturating_add(1);
        }
        Conversation { path, tokens }
    }

    /// A place in the list of system prompts.
    fn system(&mut self) -> usize {
        let weight = |place: u32| 1.0 / f64::from(place);
        let all: f64 = (1..=SYSTEM_PROMPTS).map(weight).sum();
        let mut left = self.rng.f64() * all;
        let chosen = (1..=SYSTEM_PROMPTS).position(|place| {
            left -= weight(place);
            left < 0.0
        });
        chosen.unwrap_or_default()
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.rng.f64()).ln()
    }

    fn seconds(&mut self, mean: f64) -> Duration {
        Duration::try_from_secs_f64(self.exponential(mean)).unwrap_or_default()
    }

    /// At least one.
    fn tokens(&mut self, mean: f64) -> u32 {
        let seconds = Duration::try_from_secs_f64(self.exponential(mean)).unwrap_or_default();
        let most = u64::from(LONGEST);
        u32::try_from(seconds.as_secs().min(most))
            .unwrap_or(LONGEST)
            .saturating_add(1)
    }
}
