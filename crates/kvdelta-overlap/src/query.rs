//! What each decode rank holds of a prompt, and the claim that follows. Reads only: no call here books,
//! subscribes or reorders anything.

use std::fmt;

use kvdelta_indexer::{Among, FoundAmong, Index, Millis, Prompt, TrustBook, WorkerRank};

use crate::candidate::Candidate;
use crate::choose::{Asked, Choice, NoChoice, choose};
use crate::claimable::{Claimable, NoClaim, PromptShape};
use crate::cost::{BlockCost, BlockTerms};
use crate::sizes::Place;

/// The decode ranks, and room for the answers of a query, so that the next one needs no memory.
///
/// It sets their places: the middles of equal parts, in the order of the ranks.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    /// By the places that their ranks have in `among`.
    candidates: Vec<Candidate>,
    among: Among,
}

impl Fleet {
    /// The fleet of `candidates`. Of two that name one rank the later one stays.
    pub fn new(candidates: impl IntoIterator<Item = Candidate>) -> Self {
        let mut fleet = Self::default();
        candidates.into_iter().for_each(|one| {
            fleet.put_anywhere(one);
        });
        fleet.set_places();
        fleet
    }

    /// Adds a candidate, or replaces that of its rank.
    pub fn put(&mut self, candidate: Candidate) {
        if self.put_anywhere(candidate) {
            self.set_places();
        }
    }

    /// Whether its rank is new.
    fn put_anywhere(&mut self, candidate: Candidate) -> bool {
        let at = self.among.put(candidate.of);
        match self.candidates.get_mut(at) {
            Some(old) => {
                let place = old.place;
                *old = Candidate { place, ..candidate };
                false
            }
            None => {
                self.candidates.push(candidate);
                true
            }
        }
    }

    fn set_places(&mut self) {
        let mut sorted: Vec<_> = self.candidates.iter_mut().collect();
        sorted.sort_unstable_by_key(|one| one.of);
        let all = sorted.len();
        for (at, candidate) in sorted.into_iter().enumerate() {
            candidate.place = Place::middle(at, all);
        }
    }

    /// Takes a rank out that is gone. Whether it was there.
    pub fn remove(&mut self, of: WorkerRank) -> bool {
        let Some(at) = self.among.swap_remove(of) else {
            return false;
        };
        self.candidates.swap_remove(at);
        self.set_places();
        true
    }

    /// The candidates, in no order, with what the last query found.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// A rank's facts, to be brought up to date; `None`: it is no candidate.
    pub fn candidate_mut(&mut self, of: WorkerRank) -> Option<&mut Candidate> {
        self.candidates.get_mut(self.among.place(of)?)
    }
}

/// What is asked: an index that events feed, and how far each of its ranks is trusted.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// What the ranks hold.
    pub index: &'a Index,
    /// How far it is believed. The chosen rank's standing alone is read.
    pub trust: &'a TrustBook,
}

impl Query<'_> {
    /// Writes into each candidate what its rank holds of `prompt` in device memory.
    ///
    /// The index is asked with no more than [`PromptShape::most_blocks`] hashes, and the prompt is hashed
    /// only a little further than it matches. Ranks that are no candidates are left out.
    pub fn overlaps(&self, prompt: &mut Prompt<'_>, shape: PromptShape, fleet: &mut Fleet) {
        self.ask(prompt, shape, fleet, |candidates, found| {
            for (place, candidate) in candidates.iter_mut().enumerate() {
                candidate.last = found.engine(place);
            }
        });
    }

    /// Writes the blocks into the candidates and lets `then` use the answer.
    fn ask<R>(
        &self,
        prompt: &mut Prompt<'_>,
        shape: PromptShape,
        fleet: &mut Fleet,
        then: impl FnOnce(&mut [Candidate], FoundAmong<'_>) -> R,
    ) -> R {
        let Fleet { candidates, among } = fleet;
        prompt.within(shape.most_blocks(), |prompt| {
            self.index.overlaps_among(prompt, among, |found| {
                for (candidate, blocks) in candidates.iter_mut().zip(found.blocks()) {
                    candidate.cached_blocks = *blocks;
                    candidate.last = None;
                }
                then(candidates, found)
            })
        })
    }

    /// The choice for `prompt` by a cost in blocks, and what may be claimed of it.
    ///
    /// Of the candidates, only the chosen one and the next get their engine hash.
    ///
    /// # Errors
    /// [`NoChoice`], if no candidate may be chosen.
    pub fn choose(
        &self,
        prompt: &mut Prompt<'_>,
        fleet: &mut Fleet,
        cost: BlockCost,
        asked: Asked,
        now: Millis,
    ) -> Result<Answer, NoChoice> {
        let choice = self.ask(prompt, asked.shape, fleet, |candidates, found| {
            let mut choice = choose(candidates, cost, asked)?;
            let Choice {
                best, runner_up, ..
            } = &mut choice;
            for priced in std::iter::once(best).chain(runner_up) {
                let place = found.place(priced.of());
                priced.cached.last = place.and_then(|place| found.engine(place));
                if let Some(place) = place
                    && let Some(candidate) = candidates.get_mut(place)
                {
                    candidate.last = priced.cached.last;
                }
            }
            Ok(choice)
        })?;
        let standing = self.trust.standing(choice.best.of(), now);
        let claim = choice.claim(standing, asked.shape);
        Ok(Answer { choice, claim })
    }
}

/// The choice and the claim. Its `Display` is one line that explains both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer {
    /// Which decode rank, and why.
    pub choice: Choice<BlockTerms>,
    /// What may be claimed of it, or why nothing.
    pub claim: Result<Claimable, NoClaim>,
}

impl fmt::Display for Answer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.claim {
            Ok(claim) => write!(out, "{}; claim of {} blocks", self.choice, claim.blocks),
            Err(why) => write!(out, "{}; no claim: {why}", self.choice),
        }
    }
}

#[cfg(test)]
mod tests;
