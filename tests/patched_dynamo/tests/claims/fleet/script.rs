// SPDX-License-Identifier: Apache-2.0

//! What a worker does with a request, as a test tells it.

use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result};
use dynamo_runtime::error::ErrorClass;
use tokio::sync::watch;

use super::run::LIMIT;

/// A gate at which workers wait until a test opens it, once for all.
#[derive(Clone)]
pub(crate) struct Gate {
    open: Arc<watch::Sender<bool>>,
    reached: Arc<watch::Sender<usize>>,
}

impl fmt::Debug for Gate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Gate(open: {})", *self.open.borrow())
    }
}

impl Gate {
    /// A closed gate.
    pub(crate) fn closed() -> Self {
        Self {
            open: Arc::new(watch::Sender::new(false)),
            reached: Arc::new(watch::Sender::new(0)),
        }
    }

    /// Lets all through, also those that come later.
    pub(crate) fn open(&self) {
        self.open.send_replace(true);
    }

    /// Waits until as many requests as said have come to the gate, opened or not.
    pub(crate) async fn reached_by(&self, requests: usize) -> Result<()> {
        let mut reached = self.reached.subscribe();
        tokio::time::timeout(LIMIT, reached.wait_for(|reached| *reached >= requests))
            .await
            .with_context(|| {
                format!("{} of {requests} came to a gate", *self.reached.borrow())
            })??;
        Ok(())
    }

    pub(super) async fn pass(&self) {
        self.reached.send_modify(|reached| *reached += 1);
        // The sender lives as long as `self`.
        let _ = self.open.subscribe().wait_for(|open| *open).await;
    }
}

/// A step of a worker.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// The answer begins; what comes before happens while the router waits for that.
    Begin,
    /// Waits at a gate. A request whose client is gone ends here.
    Wait(Gate),
    /// Sends one token; a prefill worker has none.
    Token,
    /// Sends the last output: a prefill worker its handover, a decode worker a token.
    Finish,
    /// Sends the last output, for the model had no more to say: nothing is handed over.
    End,
    /// Ends a request whose offer was cut for a claim: the claim was stale, and prefill is to be asked
    /// again. Nothing where the offer is whole.
    Stale,
    /// Sends the last output of one whose claim was stale, and which was recomputed.
    Recomputed,
    /// Sends a prefill worker's handover with its word that the claim was stale, as decode has told it.
    Told,
    /// Ends a request beside its prefill: the worker could not load what it had told prefill.
    Unloaded,
    /// Ends with an error that says nothing else.
    Fail,
    /// Refuses, before or after the beginning.
    Refuse(ErrorClass),
    /// The worker dies, with all that it runs.
    Die,
}

/// The steps for one request. A script without an end leaves the answer without one.
#[derive(Clone, Debug)]
pub(crate) struct Script(pub(super) Vec<Step>);

impl Script {
    /// As given.
    pub(crate) fn new(steps: impl Into<Vec<Step>>) -> Self {
        Self(steps.into())
    }

    /// Answers at once.
    pub(crate) fn answer() -> Self {
        Self::new([Step::Begin, Step::Token, Step::Finish])
    }

    /// Begins, and ends when the gate is opened.
    pub(crate) fn slow(gate: &Gate) -> Self {
        Self::new([Step::Begin, Step::Wait(gate.clone()), Step::Finish])
    }

    /// Sends a token, and ends when the gate is opened.
    pub(crate) fn slow_after_a_token(gate: &Gate) -> Self {
        Self::new([
            Step::Begin,
            Step::Token,
            Step::Wait(gate.clone()),
            Step::Finish,
        ])
    }

    /// Answers, unless the offer was cut for a claim, which is then stale.
    pub(crate) fn stale() -> Self {
        Self::new([Step::Begin, Step::Stale, Step::Token, Step::Finish])
    }

    /// Refuses before the answer begins.
    pub(crate) fn refuse(class: ErrorClass) -> Self {
        Self::new([Step::Refuse(class)])
    }

    /// Refuses after the answer began.
    pub(crate) fn refuse_late(class: ErrorClass) -> Self {
        Self::new([Step::Begin, Step::Refuse(class)])
    }
}
