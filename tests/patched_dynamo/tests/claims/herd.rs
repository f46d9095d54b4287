// SPDX-License-Identifier: Apache-2.0

//! Many requests of one prefix at once spread as the cost says (CASES.md B32).

use anyhow::{Result, ensure};

use crate::fleet::{Ask, Builder, Fleet, Gate, Script, Sent, Spec, Trace, prompt, run};
use crate::scene::{BLOCK, at_rest, hold};

/// Blocks that one decode worker holds, and those of each request beyond them.
const SHARED: usize = 50;
const OWN: usize = 4;
const REQUESTS: usize = 64;

/// A fleet of three decode workers, of which the first holds the prefix. Prefill waits at one gate,
/// decode at another.
struct Crowd {
    fleet: Fleet,
    prefix: Vec<u32>,
    prefill: Gate,
    decode: Gate,
}

impl Crowd {
    async fn start(trace: &Trace, weight: f64, frontends: usize) -> Result<Self> {
        let fleet = Builder::new(weight)?
            .prefill(1, Spec::cuts())
            .decode(3, Spec::claims())
            .frontends(frontends)
            .router(|router| router.kv_router_config.router_queue_threshold = None)
            .start(trace)
            .await?;
        let prefix = prompt(1, SHARED * BLOCK);
        hold(&fleet.decode[0], 0, &prefix)?;
        if weight > 0.0 {
            fleet.hold_known(&fleet.decode[0], 0, &prefix).await?;
        }
        let (prefill, decode) = (Gate::closed(), Gate::closed());
        fleet.prefill[0].always(Script::slow(&prefill));
        for worker in &fleet.decode {
            worker.always(Script::slow(&decode));
        }
        Ok(Self {
            fleet,
            prefix,
            prefill,
            decode,
        })
    }

    fn ask(&self, number: usize) -> Ask {
        let mut asked = self.prefix.clone();
        asked.extend(prompt(1000 + number as u64, OWN * BLOCK));
        Ask::new(&asked)
    }

    /// Sends all at once; which decode worker got how many of them.
    async fn spread(&self) -> Result<Vec<usize>> {
        let before: Vec<_> = self.legs();
        let frontends = self.fleet.frontends();
        let sent: Vec<Sent> = (0..REQUESTS)
            .map(|number| self.fleet.send_to(number % frontends, self.ask(number)))
            .collect::<Result<_>>()?;
        self.prefill.reached_by(REQUESTS).await?;
        self.prefill.open();
        self.decode
            .reached_by(before.iter().sum::<usize>() + REQUESTS)
            .await?;
        let legs = self.legs().into_iter().zip(before);
        let spread = legs.map(|(after, before)| after - before).collect();
        self.decode.open();
        for sent in sent {
            sent.answer().await?.complete()?;
        }
        Ok(spread)
    }

    fn legs(&self) -> Vec<usize> {
        let decode = self.fleet.decode.iter();
        decode.map(|worker| worker.received().len()).collect()
    }
}

/// Where requests go one after the other, each to the cheapest: `load - weight * overlap`, where a
/// request is a load of all its blocks. Of equal ones each gets its share.
fn greedy(active: [usize; 3], weight: f64) -> [f64; 3] {
    let mut legs = [0.0; 3];
    for _ in 0..REQUESTS {
        let cost = |worker: usize| {
            let held = if worker == 0 { SHARED } else { 0 };
            let load = active[worker] as f64 + (legs[worker] + 1.0) * (SHARED + OWN) as f64;
            load - weight * held as f64
        };
        let least = (0..3).map(cost).fold(f64::INFINITY, f64::min);
        let cheapest: Vec<_> = (0..3)
            .filter(|worker| cost(*worker) <= least + 1e-9)
            .collect();
        for worker in &cheapest {
            legs[*worker] += 1.0 / cheapest.len() as f64;
        }
    }
    legs
}

fn is_as(spread: &[usize], expected: [f64; 3], within: f64) -> Result<()> {
    let close = spread
        .iter()
        .zip(expected)
        .all(|(got, expected)| (*got as f64 - expected).abs() <= within);
    ensure!(
        close,
        "spread {spread:?}, by the cost {expected:?}, allowed {within}"
    );
    Ok(())
}

#[test]
fn a_crowd_spreads_as_the_cost_says() -> Result<()> {
    run(async |trace| {
        let crowd = Crowd::start(&trace, 1.0, 1).await?;
        let spread = crowd.spread().await?;
        is_as(&spread, greedy([0; 3], 1.0), 2.0)?;
        // The first one was told of what is there; it is booked, so the next ones see a load.
        let told = crowd.fleet.prefill[0].received();
        let told = told.iter().filter(|got| got.claim().is_some()).count();
        ensure!((1..4).contains(&told), "{told} claims");
        at_rest(&crowd.fleet).await
    })
}

#[test]
fn a_crowd_does_not_wait_for_a_busy_holder() -> Result<()> {
    run(async |trace| {
        let crowd = Crowd::start(&trace, 1.0, 1).await?;
        let (fleet, holder) = (&crowd.fleet, &crowd.fleet.decode[0]);
        // 400 blocks are active there.
        fleet.prefill[0].next(Script::answer());
        let busy = Ask::new(&prompt(99, 400 * BLOCK))
            .decode(holder, 0)
            .prefill(&fleet.prefill[0], 0);
        let busy = fleet.send(busy)?;
        crowd.decode.reached_by(1).await?;
        fleet.booked(holder, 1).await?;
        let spread = crowd.spread().await?;
        is_as(&spread, greedy([400, 0, 0], 1.0), 2.0)?;
        // 4 + 400 against 54: nobody waits for that one.
        let told = fleet.prefill[0].received();
        assert!(told.iter().all(|got| got.claim().is_none()));
        busy.answer().await?.complete()?;
        at_rest(fleet).await
    })
}

#[test]
fn a_crowd_one_by_one_goes_where_the_prefix_is() -> Result<()> {
    run(async |trace| {
        let crowd = Crowd::start(&trace, 1.0, 1).await?;
        crowd.prefill.open();
        crowd.decode.open();
        for number in 0..6 {
            crowd.fleet.ask(crowd.ask(number)).await?.complete()?;
            crowd.fleet.nothing_booked().await?;
        }
        assert_eq!(crowd.legs(), [6, 0, 0]);
        at_rest(&crowd.fleet).await
    })
}

#[test]
fn without_weight_a_crowd_spreads_by_load() -> Result<()> {
    run(async |trace| {
        let crowd = Crowd::start(&trace, 0.0, 1).await?;
        let spread = crowd.spread().await?;
        is_as(&spread, greedy([0; 3], 0.0), 2.0)?;
        at_rest(&crowd.fleet).await
    })
}

#[test]
fn a_crowd_at_two_frontends_spreads_too() -> Result<()> {
    run(async |trace| {
        let crowd = Crowd::start(&trace, 1.0, 2).await?;
        let spread = crowd.spread().await?;
        // What the other one books is heard a moment later.
        is_as(&spread, greedy([0; 3], 1.0), 8.0)?;
        at_rest(&crowd.fleet).await
    })
}
