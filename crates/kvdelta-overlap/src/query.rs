//! What each decode rank holds of a prompt, and the claim that follows. Reads only: no call here books,
//! subscribes or reorders anything.

use std::fmt;

use kvdelta_indexer::{Index, Millis, Overlap, Prompt, Tier, TrustBook, WorkerRank};
use rustc_hash::FxHashMap;

use crate::candidate::Candidate;
use crate::choose::{Asked, Choice, NoChoice, choose};
use crate::claimable::{Claimable, NoClaim, PromptShape};
use crate::cost::{BlockCost, BlockTerms};

/// The decode ranks, and room for the answers of a query, so that the next one needs no memory.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    candidates: Vec<Candidate>,
    places: FxHashMap<WorkerRank, usize>,
    found: Vec<Overlap>,
}

impl Fleet {
    /// The fleet of `candidates`. Of two that name one rank the later one stays.
    pub fn new(candidates: impl IntoIterator<Item = Candidate>) -> Self {
        let mut fleet = Self::default();
        candidates.into_iter().for_each(|one| fleet.put(one));
        fleet
    }

    /// Adds a candidate, or replaces that of its rank.
    pub fn put(&mut self, candidate: Candidate) {
        let end = self.candidates.len();
        let place = *self.places.entry(candidate.of).or_insert(end);
        match self.candidates.get_mut(place) {
            Some(old) => *old = candidate,
            None => self.candidates.push(candidate),
        }
    }

    /// Takes a rank out that is gone. Whether it was there.
    pub fn remove(&mut self, of: WorkerRank) -> bool {
        let Some(place) = self.places.remove(&of) else {
            return false;
        };
        self.candidates.swap_remove(place);
        if let Some(moved) = self.candidates.get(place) {
            self.places.insert(moved.of, place);
        }
        true
    }

    /// The candidates, with what the last query found.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// A rank's facts, to be brought up to date; `None`: it is no candidate.
    pub fn candidate_mut(&mut self, of: WorkerRank) -> Option<&mut Candidate> {
        let place = *self.places.get(&of)?;
        self.candidates.get_mut(place)
    }

    fn fill(&mut self) {
        for candidate in &mut self.candidates {
            candidate.cached_blocks = 0;
            candidate.last = None;
        }
        for found in &self.found {
            if found.tier == Tier::Device
                && let Some(place) = self.places.get(&found.of)
                && let Some(candidate) = self.candidates.get_mut(*place)
            {
                candidate.cached_blocks = found.blocks;
                candidate.last = Some(found.engine);
            }
        }
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
        prompt.within(shape.most_blocks(), |prompt| {
            self.index.overlaps_into(prompt, &mut fleet.found);
        });
        fleet.fill();
    }

    /// The choice for `prompt` by a cost in blocks, and what may be claimed of it.
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
        self.overlaps(prompt, asked.shape, fleet);
        let choice = choose(&fleet.candidates, cost, asked)?;
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
