// SPDX-License-Identifier: Apache-2.0

//! The decode worker of a claim gets the request, and lacks what prefill left out for it.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::fleet::{
    Ask, Builder, Fleet, Gate, Received, Script, Spec, Step, Trace, prompt, run, until,
};
use crate::scene::{HELD, Scene, WEIGHT, is_claim, longer, pair};

/// What became of stale claims, and whether each lowered the trust, oldest first.
fn stale(trace: &Trace) -> Vec<(String, bool)> {
    let lines = trace.lines("Decode claim is stale");
    lines
        .iter()
        .map(|line| {
            let recovery = line.field("recovery").to_owned();
            (recovery, line.field("is_lowered") == "true")
        })
        .collect()
}

/// All that prefill workers got, in order.
fn prefills(fleet: &Fleet) -> Vec<(u64, Received)> {
    let workers = fleet.prefill.iter();
    let mut all: Vec<_> = workers
        .flat_map(|worker| {
            let received = worker.received().into_iter();
            received.map(|got| (worker.id, got))
        })
        .collect();
    all.sort_by_key(|(_, got)| got.order);
    all
}

/// The two prefills of a request and its first decode leg are those of a stale claim.
fn is_repeated(first: &(u64, Received), second: &(u64, Received), leg: &Received) -> Result<()> {
    ensure!(first.0 == second.0, "another prefill worker");
    let (first, second) = (&first.1, &second.1);
    ensure!(first.id == second.id && leg.id == first.id);
    ensure!(first.rank() == second.rank(), "another rank");
    ensure!(first.claim_id().is_some() && leg.cut_for() == first.claim_id());
    ensure!(second.claim().is_none(), "the second has a claim, too");
    ensure!(first.release().is_none());
    ensure!(second.release().is_some() && second.release() == leg.cut_offer_id());
    Ok(())
}

#[test]
fn a_stale_claim_is_prefilled_once_more_by_the_same_workers_unseen() -> Result<()> {
    for ranks in [1, 2] {
        run(async |trace| {
            let with = |spec: Spec| Spec { ranks, ..spec };
            let builder = Builder::new(WEIGHT)?
                .prefill(2, with(Spec::cuts()))
                .decode(3, with(Spec::claims()))
                .migrations(0);
            let scene = Scene::start(&trace, builder).await?;
            scene.holder().next(Script::stale());
            let answer = scene.fleet.ask(scene.ask(1)).await?.complete()?;
            ensure!(!answer.body.contains("error"), "{}", answer.body);
            ensure!(!answer.body.contains("kvdelta"), "{}", answer.body);
            let [first, second] = prefills(&scene.fleet)
                .try_into()
                .unwrap_or_else(|all: Vec<_>| panic!("prefill ran {} times", all.len()));
            is_claim(&first.1, scene.holder(), 0, HELD)?;
            let legs = scene.holder().received();
            ensure!(legs.len() == 2, "{} legs", legs.len());
            is_repeated(&first, &second, &legs[0])?;
            ensure!(legs[1].rank() == legs[0].rank() && legs[1].cut_for().is_none());
            ensure!(legs[1].release().is_none());
            assert_eq!(stale(&trace), [("ask_again".to_owned(), true)]);
            assert_eq!(trace.spans("kv_router.repeat_prefill"), 1);
            scene.at_rest().await
        })?;
    }
    Ok(())
}

#[test]
fn a_second_failure_is_the_clients() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(Spec::cuts())?.migrations(3)).await?;
        scene.holder().next(Script::stale());
        scene.holder().next(Script::new([Step::Begin, Step::Fail]));
        let answer = scene.fleet.ask(scene.ask(1)).await?;
        ensure!(!answer.is_complete(), "{}", answer.body);
        assert_eq!(scene.prefill().received().len(), 2);
        assert_eq!(scene.holder().received().len(), 2);
        assert!(scene.fleet.decode[1].received().is_empty());
        scene.at_rest().await
    })
}

#[test]
fn an_error_that_says_nothing_or_comes_after_a_token_is_the_clients() -> Result<()> {
    for script in [
        Script::new([Step::Begin, Step::Fail]),
        Script::new([Step::Begin, Step::Token, Step::Fail]),
        Script::new([Step::Begin, Step::Token, Step::Stale]),
    ] {
        run(async |trace| {
            let scene = Scene::start(&trace, pair(Spec::cuts())?).await?;
            scene.holder().next(script.clone());
            let answer = scene.fleet.ask(scene.ask(1)).await?;
            ensure!(!answer.is_complete(), "{}", answer.body);
            assert_eq!(scene.prefill().received().len(), 1);
            assert_eq!(scene.holder().received().len(), 1);
            scene.at_rest().await
        })?;
    }
    Ok(())
}

#[test]
fn what_a_worker_recomputed_only_lowers_the_trust() -> Result<()> {
    for steps in [
        [Step::Begin, Step::Token, Step::Recomputed].as_slice(),
        &[Step::Begin, Step::Recomputed],
    ] {
        run(async |trace| {
            let scene = Scene::start(&trace, pair(Spec::cuts())?).await?;
            scene.holder().next(Script::new(steps));
            scene.fleet.ask(scene.ask(1)).await?.complete()?;
            assert_eq!(scene.prefill().received().len(), 1);
            assert_eq!(stale(&trace), [("recompute".to_owned(), true)]);
            scene.at_rest().await
        })?;
    }
    Ok(())
}

#[test]
fn claims_come_back_when_the_rank_has_cooled_down() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(Spec::cuts())?).await?;
        scene.holder().next(Script::stale());
        scene.fleet.ask(scene.ask(1)).await?.complete()?;
        let mut seed = 2;
        until("a claim is made again", async || {
            scene.fleet.ask(scene.ask(seed)).await?.complete()?;
            seed += 1;
            let received = scene.prefill().received();
            let last = received.last().context("no prefill")?;
            if last.claim().is_none() {
                return Ok(Err(crate::scene::refusal(&trace)));
            }
            is_claim(last, scene.holder(), 0, HELD)?;
            Ok(Ok(()))
        })
        .await?;
        scene.at_rest().await
    })
}

/// The worker of a stale claim, or that prefilled it, is gone before the second attempt gets there.
#[test]
fn who_is_gone_meanwhile_is_replaced() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(Spec::cuts())?.migrations(0)).await?;
        let (fleet, gate) = (&scene.fleet, Gate::closed());
        scene.holder().next(Script::stale());
        scene.prefill().next(Script::answer());
        scene.prefill().next(Script::slow(&gate));
        let sent = fleet.send(scene.ask(1))?;
        gate.reached_by(1).await?;
        scene.holder().leave();
        fleet.unrouted(0, scene.holder()).await?;
        gate.open();
        sent.answer().await?.complete()?;
        assert_eq!(scene.prefill().received().len(), 2);
        assert_eq!(scene.holder().received().len(), 1);
        assert_eq!(fleet.decode[1].received().len(), 1);
        scene.at_rest().await
    })?;
    run(async |trace| {
        let builder = Builder::new(WEIGHT)?
            .prefill(2, Spec::cuts())
            .decode(2, Spec::claims())
            .migrations(0);
        let scene = Scene::start(&trace, builder).await?;
        let (fleet, gate) = (&scene.fleet, Gate::closed());
        scene.holder().next(Script::new([
            Step::Begin,
            Step::Wait(gate.clone()),
            Step::Stale,
        ]));
        let sent = fleet.send(scene.ask(1))?;
        gate.reached_by(1).await?;
        let (first, _) = prefills(fleet)[0].clone();
        let gone = fleet.prefill.iter().find(|worker| worker.id == first);
        let gone = gone.context("no worker prefilled")?;
        gone.leave();
        until("the prefill worker is not routed to", async || {
            let ask = Ask::new(&prompt(5, 40)).prefill(gone, 0);
            let answer = fleet.ask(ask).await?;
            Ok(if answer.status == 200 {
                Err(answer.body)
            } else {
                Ok(())
            })
        })
        .await?;
        gate.open();
        sent.answer().await?.complete()?;
        let last = prefills(fleet).pop().context("no prefill")?;
        ensure!(last.0 != first && last.1.claim().is_none());
        ensure!(last.1.release().is_none(), "another worker's offer");
        scene.at_rest().await
    })
}

#[test]
fn for_a_client_that_left_nothing_is_repeated() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(Spec::cuts())?.migrations(3)).await?;
        let gate = Gate::closed();
        scene.holder().next(Script::new([
            Step::Begin,
            Step::Wait(gate.clone()),
            Step::Stale,
        ]));
        let sent = scene.fleet.send(scene.ask(1))?;
        gate.reached_by(1).await?;
        sent.disconnect();
        scene.at_rest().await?;
        gate.open();
        scene.at_rest().await?;
        assert_eq!(scene.prefill().received().len(), 1);
        assert_eq!(scene.holder().received().len(), 1);
        // And while prefill runs once more.
        let again = Gate::closed();
        scene.holder().next(Script::stale());
        scene.prefill().next(Script::answer());
        scene.prefill().next(Script::slow(&again));
        let sent = scene.fleet.send(scene.ask(2))?;
        again.reached_by(1).await?;
        sent.disconnect();
        again.open();
        scene.at_rest().await?;
        assert_eq!(scene.prefill().received().len(), 3);
        scene.at_rest().await
    })
}

#[test]
fn each_router_learns_it_by_itself() -> Result<()> {
    run(async |trace| {
        let builder = pair(Spec::cuts())?.migrations(0).frontends(2);
        let scene = Scene::start(&trace, builder).await?;
        scene.holder().always(Script::stale());
        for frontend in 0..2 {
            let before = scene.prefill().received().len();
            let sent = scene.fleet.send_to(frontend, scene.ask(frontend as u64))?;
            sent.answer().await?.complete()?;
            let prefills = scene.prefill().received();
            ensure!(
                prefills.len() == before + 2,
                "{frontend}: {}",
                prefills.len()
            );
            is_claim(&prefills[before], scene.holder(), 0, HELD)?;
            ensure!(prefills[before + 1].release().is_some());
        }
        assert_eq!(stale(&trace).len(), 2);
        scene.at_rest().await
    })
}

/// A burst of stale claims of one prefix is one report, and what follows has hardly a claim.
#[test]
fn a_worker_that_is_always_stale_gets_few_claims() -> Result<()> {
    const BURST: usize = 32;
    run(async |trace| {
        let builder = pair(Spec::cuts())?
            .migrations(0)
            .router(|router| router.kv_router_config.router_queue_threshold = None);
        let scene = Scene::start(&trace, builder).await?;
        let (fleet, gate) = (&scene.fleet, Gate::closed());
        scene.holder().always(Script::stale());
        for _ in 0..BURST {
            scene.prefill().next(Script::slow(&gate));
        }
        let sent: Vec<_> = (0..BURST)
            .map(|number| fleet.send(Ask::new(&longer(&scene.prefix, number as u64))))
            .collect::<Result<_>>()?;
        gate.reached_by(BURST).await?;
        let claims = |from: usize| {
            let received = scene.prefill().received();
            received[from..]
                .iter()
                .filter(|got| got.claim().is_some())
                .count()
        };
        let burst = claims(0);
        ensure!(burst > 1, "nobody chose the holder");
        let reported = Instant::now();
        gate.open();
        for sent in sent {
            sent.answer().await?.complete()?;
        }
        let lowered = |trace: &Trace| stale(trace).iter().filter(|(_, lowered)| *lowered).count();
        assert_eq!(stale(&trace).len(), burst);
        assert_eq!(lowered(&trace), 1);
        assert_eq!(scene.prefill().received().len(), BURST + burst);

        let before = scene.prefill().received().len();
        for number in 0..16 {
            fleet.ask(scene.ask(100 + number)).await?.complete()?;
        }
        // Each was made after all of the pauses before it, of 1, 2, 4, ... seconds.
        let made = claims(before);
        let pauses = (1_u64 << made) - 1;
        ensure!(pauses <= reported.elapsed().as_secs(), "{made} claims");
        assert_eq!(lowered(&trace), 1 + made);
        let mut runs = BTreeMap::<_, usize>::new();
        for got in scene.prefill().received() {
            *runs.entry(got.id).or_default() += 1;
        }
        ensure!(runs.values().all(|runs| *runs <= 2), "{runs:?}");
        scene.at_rest().await
    })
}
