// SPDX-License-Identifier: Apache-2.0

//! The phases of the series: a patch's place in it gives its phase.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Error, Result};

/// A phase of the RFC, or a part of one; each has one patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// The decode pool's overlap has weight.
    One,
    /// Decode is asked before prefill.
    TwoA,
    /// The claim on the prefill request.
    TwoB,
    /// Only what is missing travels.
    Three,
    /// The cost is measured.
    Four,
}

impl Phase {
    /// In the order of the series.
    pub(crate) const ALL: [Self; 5] = [Self::One, Self::TwoA, Self::TwoB, Self::Three, Self::Four];

    /// The phase of the patch at this place of the series, counted from 1.
    ///
    /// # Errors
    /// There is no phase for the place.
    pub(crate) fn at(place: usize) -> Result<Self> {
        let phase = place.checked_sub(1).and_then(|index| Self::ALL.get(index));
        phase
            .copied()
            .with_context(|| format!("patch {place} of the series: the phases are {}", listed()))
    }

    /// The place of its patch in the series, counted from 1.
    pub(crate) fn place(self) -> usize {
        let before = Self::ALL.iter().filter(|phase| **phase < self);
        before.count() + 1
    }

    /// How headers, options and pull requests name it.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::One => "1",
            Self::TwoA => "2a",
            Self::TwoB => "2b",
            Self::Three => "3",
            Self::Four => "4",
        }
    }

    /// The crates of this repository that come with it.
    pub(crate) fn crates(self) -> &'static [&'static str] {
        match self {
            Self::One => &["kvdelta-indexer"],
            Self::TwoA => &["kvdelta-overlap"],
            Self::TwoB => &["kvdelta-protocol"],
            Self::Three => &["kvdelta-transfer"],
            Self::Four => &[],
        }
    }

    /// Lines that its patch may have outside tests, new crates and docs; `None`: no limit.
    pub(crate) fn line_limit(self) -> Option<usize> {
        (self == Self::One).then_some(150)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.label())
    }
}

impl FromStr for Phase {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let named = Self::ALL.into_iter().find(|phase| phase.label() == text);
        named.with_context(|| format!("{text:?} is no phase: they are {}", listed()))
    }
}

fn listed() -> String {
    Phase::ALL.map(Phase::label).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_labels_are_those_of_the_series() {
        let labels = ["1", "2a", "2b", "3", "4"];
        for (index, label) in labels.into_iter().enumerate() {
            let phase = Phase::at(index + 1).unwrap();
            assert_eq!(phase.to_string(), label);
            assert_eq!(phase.place(), index + 1);
            assert_eq!(label.parse::<Phase>().unwrap(), phase);
        }
        assert!(Phase::at(0).is_err());
        assert!(Phase::at(6).is_err());
        for other in ["2", "2A", "", "5"] {
            let error = other.parse::<Phase>().unwrap_err().to_string();
            assert!(error.contains("1, 2a, 2b, 3, 4"), "{error}");
        }
    }
}
