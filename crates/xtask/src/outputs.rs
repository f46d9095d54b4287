// SPDX-License-Identifier: Apache-2.0

//! Is an answer that of the aggregated worker? Pure.

use serde::Serialize;

/// An answer of the aggregated worker.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reference {
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
    /// At each token, the second best.
    pub(crate) rivals: Vec<Rival>,
}

/// The second best choice at a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rival {
    /// The token that it is.
    pub(crate) token: u32,
    /// The log-probability of the best minus its own.
    pub(crate) margin: f64,
}

/// How an answer compares with the reference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// The same tokens.
    Equal,
    /// First the reference's second best, where that is closer than epsilon to its best.
    NearTie {
        /// Index of that token.
        token: usize,
        /// The reference's margin there.
        margin: f64,
    },
    /// Another answer.
    Different {
        /// Index of the first token that differs.
        token: usize,
        /// The reference's margin there; `None` behind its end.
        margin: Option<f64>,
    },
}

/// Compares `answer` with `reference`. Batching changes the order of float additions, so a
/// greedy choice between the two best tokens, closer than `epsilon`, may fall the other way, and
/// everything after it may differ.
pub(crate) fn compare(reference: &Reference, answer: &[u32], epsilon: f64) -> Verdict {
    if answer == reference.tokens {
        return Verdict::Equal;
    }
    let token = reference
        .tokens
        .iter()
        .zip(answer)
        .take_while(|(expected, found)| expected == found)
        .count();
    let margin = reference.rivals.get(token).map(|rival| rival.margin);
    match (reference.rivals.get(token), answer.get(token)) {
        (Some(rival), Some(found)) if rival.margin < epsilon && rival.token == *found => {
            Verdict::NearTie {
                token,
                margin: rival.margin,
            }
        }
        _ => Verdict::Different { token, margin },
    }
}

/// Counts of verdicts over a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Tally {
    /// Answers equal to the reference.
    pub(crate) equal: usize,
    /// Answers that differ from a near tie on.
    pub(crate) near_ties: usize,
    /// Answers that differ otherwise.
    pub(crate) different: usize,
}

impl Tally {
    /// Counts `verdicts`.
    pub(crate) fn of<'a>(verdicts: impl IntoIterator<Item = &'a Verdict>) -> Self {
        let mut tally = Self::default();
        for verdict in verdicts {
            match verdict {
                Verdict::Equal => tally.equal += 1,
                Verdict::NearTie { .. } => tally.near_ties += 1,
                Verdict::Different { .. } => tally.different += 1,
            }
        }
        tally
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(margins: &[f64]) -> Reference {
        Reference {
            tokens: (5..).take(margins.len()).collect(),
            rivals: margins
                .iter()
                .map(|&margin| Rival { token: 9, margin })
                .collect(),
        }
    }

    #[test]
    fn only_the_rival_at_a_near_tie_is_excused() {
        let reference = reference(&[1.0, 0.0001, 2.0]);
        let verdict = |answer: &[u32]| compare(&reference, answer, 0.001);
        assert_eq!(verdict(&[5, 6, 7]), Verdict::Equal);
        assert_eq!(
            verdict(&[5, 9, 9]),
            Verdict::NearTie {
                token: 1,
                margin: 0.0001
            }
        );
        let different = |token, margin| Verdict::Different { token, margin };
        assert_eq!(verdict(&[9, 6, 7]), different(0, Some(1.0)));
        // A third token is no rival.
        assert_eq!(verdict(&[5, 8, 7]), different(1, Some(0.0001)));
        // The tie was taken as in the reference, so what follows has no excuse.
        assert_eq!(verdict(&[5, 6, 9]), different(2, Some(2.0)));
    }

    #[test]
    fn a_shorter_or_longer_answer_is_different() {
        let reference = reference(&[0.0001, 0.0001]);
        assert_eq!(
            compare(&reference, &[5], 0.001),
            Verdict::Different {
                token: 1,
                margin: Some(0.0001)
            }
        );
        assert_eq!(
            compare(&reference, &[5, 6, 7], 0.001),
            Verdict::Different {
                token: 2,
                margin: None
            }
        );
    }
}
