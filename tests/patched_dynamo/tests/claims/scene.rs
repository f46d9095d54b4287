// SPDX-License-Identifier: Apache-2.0

//! What most tests begin and end with: a decode worker that holds a prefix, and a fleet at rest.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::fleet::{
    Ask, Builder, Fleet, Gate, Received, Script, Sent, Spec, Trace, Worker, prompt,
};

/// Tokens in a block of every fleet here, unless a test says otherwise.
pub(crate) const BLOCK: usize = 8;
/// Blocks of the prefix that the first decode worker holds.
pub(crate) const HELD: usize = 16;
/// The weight of a prefix in all fleets that have claims.
pub(crate) const WEIGHT: f64 = 2.0;
const FIRST_HASH: u64 = 0x9123_4567_89ab_0000;

/// A fleet whose first decode worker holds a prefix.
pub(crate) struct Scene {
    pub(crate) fleet: Fleet,
    pub(crate) prefix: Vec<u32>,
}

/// The engine's hash of the block that ends the first `blocks` of a stored prefix.
pub(crate) fn engine_hash(blocks: usize) -> u64 {
    FIRST_HASH + blocks as u64
}

/// A rank holds the whole blocks of `tokens`, under hashes that are the engine's own.
pub(crate) fn hold(worker: &Worker, rank: usize, tokens: &[u32]) -> Result<()> {
    let hashes: Vec<_> = (1..=tokens.len() / BLOCK).map(engine_hash).collect();
    worker.store_after(rank, None, tokens, &hashes)
}

/// `prefix` and some tokens that nobody holds.
pub(crate) fn longer(prefix: &[u32], seed: u64) -> Vec<u32> {
    let mut asked = prefix.to_vec();
    asked.extend(prompt(1000 + seed, 20));
    asked
}

/// A prefill worker that is one of a kind, and two decode workers that settle claims.
pub(crate) fn pair(prefill: Spec) -> Result<Builder> {
    Ok(Builder::new(WEIGHT)?
        .prefill(1, prefill)
        .decode(2, Spec::claims()))
}

impl Scene {
    /// Starts a fleet, and waits until its frontends know what its first decode worker holds.
    pub(crate) async fn start(trace: &Trace, builder: Builder) -> Result<Self> {
        let fleet = builder.start(trace).await?;
        let prefix = prompt(1, HELD * BLOCK);
        hold(&fleet.decode[0], 0, &prefix)?;
        fleet.hold_known(&fleet.decode[0], 0, &prefix).await?;
        Ok(Self { fleet, prefix })
    }

    /// The worker that holds the prefix.
    pub(crate) fn holder(&self) -> &Arc<Worker> {
        &self.fleet.decode[0]
    }

    /// The first prefill worker.
    pub(crate) fn prefill(&self) -> &Arc<Worker> {
        &self.fleet.prefill[0]
    }

    /// A request of the prefix and some tokens that nobody holds.
    pub(crate) fn ask(&self, seed: u64) -> Ask {
        Ask::new(&longer(&self.prefix, seed))
    }

    /// Sends a request that waits in prefill, with a claim of all that the first worker holds, until
    /// the gate is opened.
    pub(crate) async fn claimed(&self, gate: &Gate) -> Result<Sent> {
        self.prefill().next(Script::slow(gate));
        let before = self.prefill().received().len();
        let sent = self.fleet.send(self.ask(1))?;
        gate.reached_by(1).await?;
        let got = self.prefill().until_received(before + 1).await?;
        is_claim(&got[before], self.holder(), 0, HELD)?;
        Ok(sent)
    }

    /// The fleet is at rest, see [`at_rest`].
    pub(crate) async fn at_rest(&self) -> Result<()> {
        at_rest(&self.fleet).await
    }
}

impl Fleet {
    /// Waits until all frontends know that a rank holds the whole of `prefix`.
    pub(crate) async fn hold_known(
        &self,
        worker: &Worker,
        rank: u32,
        prefix: &[u32],
    ) -> Result<()> {
        for frontend in 0..self.frontends() {
            let blocks = prefix.len() / BLOCK;
            self.holds(frontend, worker, rank, prefix, blocks).await?;
        }
        Ok(())
    }
}

/// The request came with a claim of these blocks.
pub(crate) fn is_claim(got: &Received, worker: &Worker, rank: u32, blocks: usize) -> Result<()> {
    let mut claim = got.claim().context("no claim came")?.clone();
    let id = claim
        .as_object_mut()
        .and_then(|fields| fields.remove("claim_id"));
    ensure!(
        id.as_ref()
            .and_then(Value::as_str)
            .is_some_and(|id| !id.is_empty())
    );
    let right = json!({
        "version": 1,
        "decode_worker_id": worker.id,
        "decode_dp_rank": rank,
        "cached_prefix_blocks": blocks,
        "block_size": worker.spec.block_tokens,
        "prefix_hash": engine_hash(blocks),
    });
    ensure!(claim == right, "the claim is {claim}, not {right}");
    Ok(())
}

/// Nothing is booked, no claim is known to a decode worker, no claim was made twice, and what was
/// left out for a claim went to the rank of that claim alone, once.
pub(crate) async fn at_rest(fleet: &Fleet) -> Result<()> {
    fleet.nothing_booked().await?;
    let mut claims = BTreeMap::new();
    for got in fleet.prefill.iter().flat_map(|worker| worker.received()) {
        if let Some(id) = got.claim_id() {
            let of = (
                got.claimed("decode_worker_id"),
                got.claimed("decode_dp_rank"),
            );
            let twice = claims.insert(id.to_owned(), of);
            ensure!(twice.is_none(), "claim {id} was made twice");
        }
    }
    for worker in &fleet.decode {
        for got in worker.received() {
            ensure!(got.claim().is_none(), "{} got a claim", worker.name());
            let Some(id) = got.cut_for() else {
                continue;
            };
            let of = claims.remove(id);
            ensure!(
                of == Some((Some(worker.id), got.rank())),
                "{}, rank {:?}, got what was cut for {of:?} in {id}",
                worker.name(),
                got.rank()
            );
        }
    }
    Ok(())
}

/// Why the router last said that a request has no claim.
pub(crate) fn refusal(trace: &Trace) -> String {
    let lines = trace.lines("No decode claim");
    lines
        .last()
        .map_or("", |line| line.field("reason"))
        .to_owned()
}

/// Why claims were void, oldest first.
pub(crate) fn voided(trace: &Trace) -> Vec<String> {
    let lines = trace.lines("Decode claim is void");
    lines
        .iter()
        .map(|line| line.field("reason").to_owned())
        .collect()
}
