// SPDX-License-Identifier: Apache-2.0

//! The prefill workers: each computes one prompt after the other.

use std::time::Duration;

use kvdelta_indexer::WorkerRank;
use kvdelta_overlap::PrefillCandidate;

use super::cache::Cache;
use super::settings::{Settings, taken};
use crate::trace::{Node, Request};

/// The pool.
#[derive(Debug)]
pub(crate) struct PrefillPool {
    workers: Vec<Worker>,
    tokens_per_s: f64,
    block_tokens: usize,
    /// What is thrown out of a prefix cache; nobody is told.
    gone: Vec<Node>,
    candidates: Vec<PrefillCandidate>,
}

#[derive(Debug)]
struct Worker {
    /// When all that was given to it is done.
    free_at: Duration,
    cache: Option<Cache>,
}

impl PrefillPool {
    pub(crate) fn new(settings: &Settings, block_tokens: usize) -> Self {
        let capacity = settings.prefill_capacity;
        let worker = || Worker {
            free_at: Duration::ZERO,
            cache: (capacity > 0).then(|| Cache::new(capacity)),
        };
        Self {
            workers: (0..settings.prefill).map(|_| worker()).collect(),
            tokens_per_s: settings.prefill_tokens_per_s,
            block_tokens,
            gone: Vec::new(),
            candidates: Vec::new(),
        }
    }

    /// The worker that would be done with a prompt first; of equal ones, the one that has been idle longest.
    pub(crate) fn soonest(&self, request: &Request, path: &[Node], now: Duration) -> usize {
        let done = |worker: &Worker| {
            if worker.cache.is_none() {
                // It takes all of them as long.
                return Duration::ZERO;
            }
            let wait = worker.free_at.saturating_sub(now);
            let cached = self.cached(worker, request, path);
            wait.saturating_add(self.time(request.prompt_tokens as usize - cached))
        };
        let workers = self.workers.iter().enumerate();
        let soonest = workers.min_by_key(|(_, worker)| (done(worker), worker.free_at));
        soonest.map_or(0, |(place, _)| place)
    }

    /// The workers as the cost of a pair sees them.
    pub(crate) fn candidates(
        &mut self,
        request: &Request,
        path: &[Node],
        now: Duration,
    ) -> &[PrefillCandidate] {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        candidates.extend(self.workers.iter().zip(0..).map(|(worker, number)| {
            let wait = worker.free_at.saturating_sub(now).as_secs_f64();
            let cached = self.cached(worker, request, path);
            PrefillCandidate::new(WorkerRank::new(number, 0))
                .with_queued(whole(wait * self.tokens_per_s))
                .with_cached(cached / self.block_tokens)
        }));
        self.candidates = candidates;
        &self.candidates
    }

    /// Gives a worker the prompt. When it is done.
    pub(crate) fn compute(
        &mut self,
        place: usize,
        request: &Request,
        path: &[Node],
        now: Duration,
    ) -> Duration {
        let cached = self.cached(&self.workers[place], request, path);
        let time = self.time(request.prompt_tokens as usize - cached);
        let worker = &mut self.workers[place];
        worker.free_at = worker.free_at.max(now).saturating_add(time);
        if let Some(cache) = &mut worker.cache {
            // Prompts are computed one after the other, so what comes next finds it.
            let held = cache.held(path);
            if cache.admit(&path[..held], path.len() - held, &mut self.gone) {
                cache.fill(&path[held..]);
                cache.release(path, 0);
            }
            self.gone.clear();
        }
        worker.free_at
    }

    /// Gives a worker a prompt that it has just had, of which it computes the last block. When it is done.
    pub(crate) fn repeat(&mut self, place: usize, request: &Request, now: Duration) -> Duration {
        let time = self.time(self.block_tokens.min(request.prompt_tokens as usize));
        let worker = &mut self.workers[place];
        worker.free_at = worker.free_at.max(now).saturating_add(time);
        worker.free_at
    }

    /// Tokens of a prompt that a worker need not compute; the last one it always does.
    fn cached(&self, worker: &Worker, request: &Request, path: &[Node]) -> usize {
        let Some(cache) = &worker.cache else {
            return 0;
        };
        let most = (request.prompt_tokens as usize).saturating_sub(1) / self.block_tokens;
        let path = path.get(..most).unwrap_or(path);
        cache.held(path) * self.block_tokens
    }

    fn time(&self, tokens: usize) -> Duration {
        taken(tokens as f64, self.tokens_per_s)
    }
}

/// A number of tokens, rounded up.
fn whole(tokens: f64) -> usize {
    let seconds = Duration::try_from_secs_f64(tokens.ceil()).unwrap_or(Duration::MAX);
    usize::try_from(seconds.as_secs()).unwrap_or(usize::MAX)
}
