// SPDX-License-Identifier: Apache-2.0

//! No claim of what is gone, or of events that are not complete.

use anyhow::Result;
use dynamo_llm::worker_type::WorkerType;

use crate::fleet::prompt;
use crate::fleet::{Ask, Builder, Spec, run};
use crate::scene::{
    BLOCK, HELD, Scene, WEIGHT, at_rest, engine_hash, hold, is_claim, longer, pair, refusal,
};

#[test]
fn what_was_cleared_is_claimed_no_more() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(Spec::cuts())?).await?;
        let (fleet, holder) = (&scene.fleet, scene.holder());
        fleet.ask(scene.ask(1)).await?.complete()?;
        is_claim(&scene.prefill().received()[0], holder, 0, HELD)?;
        holder.clear(0)?;
        fleet.holds(0, holder, 0, &scene.prefix, 0).await?;
        fleet.ask(scene.ask(2)).await?.complete()?;
        assert_eq!(scene.prefill().received()[1].claim(), None);
        assert_eq!(refusal(&trace), "nothing_cached");
        // What is there again is claimed again.
        hold(holder, 0, &scene.prefix[..7 * BLOCK])?;
        fleet.holds(0, holder, 0, &scene.prefix, 7).await?;
        fleet.ask(scene.ask(3)).await?.complete()?;
        is_claim(&scene.prefill().received()[2], holder, 0, 7)?;
        scene.at_rest().await
    })
}

#[test]
fn a_hole_ends_a_claim() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(Spec::cuts())?).await?;
        let (fleet, holder) = (&scene.fleet, scene.holder());
        // The engine keeps what comes after, but nobody can reach it.
        holder.remove(0, &[engine_hash(6)])?;
        fleet.holds(0, holder, 0, &scene.prefix, 5).await?;
        fleet.ask(scene.ask(1)).await?.complete()?;
        is_claim(&scene.prefill().received()[0], holder, 0, 5)?;
        holder.remove(0, &[engine_hash(1)])?;
        fleet.holds(0, holder, 0, &scene.prefix, 0).await?;
        fleet.ask(scene.ask(2)).await?.complete()?;
        assert_eq!(scene.prefill().received()[1].claim(), None);
        scene.at_rest().await
    })
}

#[test]
fn a_worker_that_restarts_has_nothing() -> Result<()> {
    run(async |trace| {
        let mut scene = Scene::start(&trace, pair(Spec::cuts())?.frontends(2)).await?;
        scene.fleet.ask(scene.ask(1)).await?.complete()?;
        let old = scene.holder().clone();
        old.die();
        old.leave();
        for frontend in 0..2 {
            scene.fleet.unrouted(frontend, &old).await?;
        }
        let new = scene
            .fleet
            .start_worker(WorkerType::Decode, Spec::claims())
            .await?;
        scene.fleet.served().await?;
        for frontend in 0..2 {
            for number in 0..3 {
                let ask = scene.ask(10 + number);
                let sent = scene.fleet.send_to(frontend, ask)?;
                sent.answer().await?.complete()?;
                assert_eq!(scene.prefill().received().last().unwrap().claim(), None);
            }
        }
        assert_eq!(old.received().len(), 1);
        hold(&new, 0, &scene.prefix)?;
        scene.fleet.hold_known(&new, 0, &scene.prefix).await?;
        for frontend in 0..2 {
            let sent = scene.fleet.send_to(frontend, scene.ask(20))?;
            sent.answer().await?.complete()?;
            is_claim(scene.prefill().received().last().unwrap(), &new, 0, HELD)?;
        }
        scene.at_rest().await
    })
}

#[test]
fn what_a_worker_says_after_it_left_counts_for_nothing() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(Spec::cuts())?).await?;
        let (fleet, holder) = (&scene.fleet, scene.holder().clone());
        let late = prompt(5, HELD * BLOCK);
        holder.leave();
        // Told or not, by then nobody listens.
        let _ = hold(&holder, 0, &late);
        fleet.unrouted(0, &holder).await?;
        for asked in [&scene.prefix, &late, &late] {
            fleet.ask(Ask::new(&longer(asked, 1))).await?.complete()?;
            assert_eq!(scene.prefill().received().last().unwrap().claim(), None);
        }
        assert_eq!(fleet.decode[1].received().len(), 3);
        scene.at_rest().await
    })
}

#[test]
fn events_that_cannot_be_recovered_make_no_claim() -> Result<()> {
    run(async |trace| {
        let spec = Spec {
            local_indexer: false,
            ..Spec::claims()
        };
        let fleet = Builder::new(WEIGHT)?
            .prefill(1, Spec::cuts())
            .decode(2, spec)
            .start(&trace)
            .await?;
        let (holder, prefix) = (&fleet.decode[0], prompt(1, HELD * BLOCK));
        hold(holder, 0, &prefix)?;
        fleet.hold_known(holder, 0, &prefix).await?;
        // The decode leg goes there all the same.
        fleet.ask(Ask::new(&longer(&prefix, 1))).await?.complete()?;
        assert_eq!(holder.received().len(), 1);
        assert_eq!(fleet.prefill[0].received()[0].claim(), None);
        assert_eq!(refusal(&trace), "untrusted");
        at_rest(&fleet).await
    })
}

#[test]
fn a_frontend_that_comes_late_claims_what_it_recovers() -> Result<()> {
    run(async |trace| {
        let mut scene = Scene::start(&trace, pair(Spec::cuts())?).await?;
        scene.holder().remove(0, &[engine_hash(HELD)])?;
        scene.fleet.start_frontend().await?;
        scene.fleet.served().await?;
        for frontend in 0..2 {
            let (fleet, holder) = (&scene.fleet, scene.holder());
            fleet
                .holds(frontend, holder, 0, &scene.prefix, HELD - 1)
                .await?;
            let sent = fleet.send_to(frontend, scene.ask(1))?;
            sent.answer().await?.complete()?;
            is_claim(
                scene.prefill().received().last().unwrap(),
                holder,
                0,
                HELD - 1,
            )?;
        }
        scene.at_rest().await
    })
}
