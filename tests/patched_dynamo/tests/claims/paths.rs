// SPDX-License-Identifier: Apache-2.0

//! Claims beside Dynamo's other ways to route: bootstrap, sessions, zones, conditional disaggregation.

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Result, ensure};
use dynamo_runtime::error::ErrorClass;

use crate::fleet::{Ask, Builder, Gate, Outcome, Script, Spec, Step, Trace, prompt, run, until};
use crate::scene::{
    BLOCK, HELD, Scene, WEIGHT, at_rest, hold, is_claim, longer, pair, refusal, voided,
};

/// Prefills after failed loads that one process repeats at once, as the patch has it.
const MAX_LOAD_REPEATS: usize = 16;

/// So many prefill workers that run beside as many decode workers, whose loads can fail.
fn tiered(workers: usize) -> Result<Builder> {
    Ok(Builder::new(WEIGHT)?
        .prefill(workers, bootstrap())
        .decode(workers, Spec::with_lower_tiers())
        .migrations(0))
}

/// Tests whose loads fail take turns: this process is the frontend of all of them.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bootstrap() -> Spec {
    Spec {
        bootstrap: true,
        ..Spec::cuts()
    }
}

#[test]
fn with_bootstrap_decode_is_chosen_before_prefill_is_sent() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(bootstrap())?).await?;
        let (fleet, prefill, holder) = (&scene.fleet, scene.prefill(), scene.holder());
        let gate = Gate::closed();
        prefill.next(Script::slow(&gate));
        let sent = fleet.send(scene.ask(1))?;
        gate.reached_by(1).await?;
        // Decode has begun while prefill runs.
        let leg = &holder.until_received(1).await?[0];
        let told = &prefill.received()[0];
        is_claim(told, holder, 0, HELD)?;
        assert!(told.order < leg.order);
        assert!(leg.claim().is_none() && leg.request["bootstrap_info"].is_object());
        fleet.booked(holder, 1).await?;
        gate.open();
        sent.answer().await?.complete()?;
        scene.at_rest().await
    })
}

/// The worker of a claim is lost after prefill started beside it.
async fn lose_bootstrapped(trace: &Trace, script: Script) -> Result<()> {
    let scene = Scene::start(trace, pair(bootstrap())?).await?;
    let (fleet, prefill, holder) = (&scene.fleet, scene.prefill(), scene.holder());
    let gate = Gate::closed();
    prefill.next(Script::slow(&gate));
    holder.next(script);
    fleet.ask(scene.ask(1)).await?.complete()?;
    let told = prefill
        .until("the first one's end", |all| {
            all[0].outcome != Outcome::Running
        })
        .await?;
    // Nobody will fetch what the first one has.
    assert_eq!(told.len(), 2);
    is_claim(&told[0], holder, 0, HELD)?;
    assert_eq!(told[0].outcome, Outcome::Aborted);
    assert_eq!(
        (told[1].claim(), told[1].outcome),
        (None, Outcome::Finished)
    );
    let leg = &fleet.decode[1].received()[0];
    let (of_first, of_leg) = (
        holder.received()[0].request["bootstrap_info"]["bootstrap_room"].clone(),
        leg.request["bootstrap_info"]["bootstrap_room"].clone(),
    );
    ensure!(
        of_leg.is_u64() && of_first != of_leg,
        "{of_first}, {of_leg}"
    );
    scene.at_rest().await
}

#[test]
fn with_bootstrap_a_lost_worker_costs_a_second_prefill() -> Result<()> {
    for script in [
        Script::refuse(ErrorClass::WorkerOverloaded),
        Script::new([Step::Die]),
    ] {
        run(async |trace| lose_bootstrapped(&trace, script.clone()).await)?;
    }
    Ok(())
}

#[test]
fn with_bootstrap_a_prefill_that_fails_ends_the_request() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(bootstrap())?.migrations(0)).await?;
        let (prefill, holder) = (scene.prefill(), scene.holder());
        let gate = Gate::closed();
        holder.next(Script::slow_after_a_token(&gate));
        prefill.next(Script::refuse_late(ErrorClass::WorkerOverloaded));
        let answer = scene.fleet.ask(scene.ask(1)).await?;
        ensure!(!answer.is_complete(), "{}", answer.body);
        gate.open();
        scene.at_rest().await
    })
}

#[test]
fn with_bootstrap_prefill_says_that_a_claim_was_stale() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(bootstrap())?).await?;
        let (fleet, prefill) = (&scene.fleet, scene.prefill());
        prefill.next(Script::new([Step::Begin, Step::Told]));
        let answer = fleet.ask(scene.ask(1)).await?.complete()?;
        ensure!(!answer.body.contains("kvdelta"), "{}", answer.body);
        let [line] = &trace.lines("Decode claim is stale")[..] else {
            anyhow::bail!("not one stale claim");
        };
        assert_eq!(
            (line.field("recovery"), line.field("is_lowered")),
            ("sent", "true")
        );
        assert_eq!(prefill.received().len(), 1);
        scene.at_rest().await
    })
}

#[test]
fn with_bootstrap_a_prefix_that_decode_cannot_load_costs_a_second_prefill() -> Result<()> {
    let _turn = turn();
    run(async |trace| {
        let scene = Scene::start(&trace, tiered(2)?).await?;
        scene
            .holder()
            .next(Script::new([Step::Begin, Step::Unloaded]));
        let answer = scene.fleet.ask(scene.ask(1)).await?.complete()?;
        ensure!(!answer.body.contains("error"), "{}", answer.body);
        let prefills: Vec<_> = scene
            .fleet
            .prefill
            .iter()
            .map(|worker| worker.received())
            .collect();
        let [told] = &prefills
            .iter()
            .filter(|all| !all.is_empty())
            .collect::<Vec<_>>()[..]
        else {
            anyhow::bail!("two prefill workers");
        };
        let [first, second] = &told[..] else {
            anyhow::bail!("prefill ran {} times", told.len());
        };
        is_claim(first, scene.holder(), 0, HELD)?;
        ensure!(second.claim().is_none(), "the second has a claim, too");
        let mut legs: Vec<_> = scene
            .fleet
            .decode
            .iter()
            .flat_map(|worker| worker.received())
            .collect();
        legs.sort_by_key(|leg| leg.order);
        let salts = legs
            .iter()
            .map(|leg| leg.request.pointer("/routing/cache_salt"));
        let salts: Vec<_> = salts
            .map(|salt| salt.is_some_and(|salt| salt.is_string()))
            .collect();
        assert_eq!(salts, [false, true]);
        assert!(trace.lines("Decode claim is stale").is_empty());
        scene.at_rest().await
    })
}

#[test]
fn of_a_crowd_whose_loads_fail_no_more_than_sixteen_are_prefilled_again_at_once() -> Result<()> {
    const CROWD: usize = MAX_LOAD_REPEATS + 4;
    let _turn = turn();
    run(async |trace| {
        let scene = Scene::start(&trace, tiered(1)?).await?;
        let (fleet, prefill, holder) = (&scene.fleet, scene.prefill(), scene.holder());
        let (fail, answer) = (Gate::closed(), Gate::closed());
        let unloaded =
            |gate: &Gate| Script::new([Step::Begin, Step::Wait(gate.clone()), Step::Unloaded]);
        for _ in 0..CROWD {
            holder.next(unloaded(&fail));
        }
        holder.always(Script::slow(&answer));
        let crowd: Vec<_> = (0..CROWD)
            .map(|seed| fleet.send(scene.ask(seed as u64)))
            .collect::<Result<_>>()?;
        fail.reached_by(CROWD).await?;
        fail.open();
        let refused = until("all loads to fail", async || {
            let lines = trace.lines("Decode worker could not load");
            Ok(match lines.len() {
                CROWD => Ok(lines
                    .iter()
                    .filter(|line| line.field("kind") == "too_many")
                    .count()),
                others => Err(others.to_string()),
            })
        })
        .await?;
        assert_eq!(refused, CROWD - MAX_LOAD_REPEATS);
        answer.reached_by(MAX_LOAD_REPEATS).await?;
        answer.open();
        let mut complete = 0;
        for sent in crowd {
            complete += usize::from(sent.answer().await?.is_complete());
        }
        assert_eq!(complete, MAX_LOAD_REPEATS);
        assert_eq!(prefill.received().len(), CROWD + MAX_LOAD_REPEATS);
        // They make room for others.
        holder.next(unloaded(&fail));
        fleet.ask(scene.ask(99)).await?.complete()?;
        scene.at_rest().await
    })
}

#[test]
fn with_bootstrap_a_client_that_leaves_leaves_no_booking() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(bootstrap())?).await?;
        let (prefill, holder) = (scene.prefill(), scene.holder());
        let (of_prefill, of_decode) = (Gate::closed(), Gate::closed());
        prefill.next(Script::slow(&of_prefill));
        holder.next(Script::slow_after_a_token(&of_decode));
        let mut sent = scene.fleet.send(scene.ask(1))?;
        sent.messages(1).await?;
        is_claim(&prefill.received()[0], holder, 0, HELD)?;
        sent.disconnect();
        holder
            .until("an aborted request", |all| {
                all[0].outcome == Outcome::Aborted
            })
            .await?;
        of_prefill.open();
        prefill
            .until("an end", |all| all[0].outcome != Outcome::Running)
            .await?;
        scene.at_rest().await?;
        scene.fleet.ask(scene.ask(2)).await?.complete()?;
        scene.at_rest().await
    })
}

#[test]
fn a_session_has_claims_from_its_second_request() -> Result<()> {
    run(async |trace| {
        let builder =
            pair(Spec::cuts())?.router(|router| router.session_affinity_ttl_secs = Some(600));
        let scene = Scene::start(&trace, builder).await?;
        let (fleet, prefill, holder) = (&scene.fleet, scene.prefill(), scene.holder());
        let ask = |seed| scene.ask(seed).header("x-dynamo-session-id", "a");
        fleet.ask(ask(1)).await?.complete()?;
        assert_eq!(prefill.received()[0].claim(), None);
        assert_eq!(refusal(&trace), "unbound_session");
        // By the cost it got to the holder; there the session stays.
        assert_eq!(holder.received().len(), 1);
        for seed in 2..4 {
            fleet.ask(ask(seed)).await?.complete()?;
            is_claim(prefill.received().last().unwrap(), holder, 0, HELD)?;
        }
        // Another session's worker is not that one, if it began elsewhere.
        let elsewhere = prompt(50, HELD * BLOCK);
        hold(&fleet.decode[1], 0, &elsewhere)?;
        fleet.hold_known(&fleet.decode[1], 0, &elsewhere).await?;
        let other = |asked: &[u32]| Ask::new(asked).header("x-dynamo-session-id", "b");
        fleet.ask(other(&longer(&elsewhere, 1))).await?.complete()?;
        assert_eq!(fleet.decode[1].received().len(), 1);
        fleet
            .ask(other(&longer(&scene.prefix, 9)))
            .await?
            .complete()?;
        assert_eq!(fleet.decode[1].received().len(), 2);
        assert_eq!(prefill.received().last().unwrap().claim(), None);
        fleet.ask(other(&longer(&elsewhere, 2))).await?.complete()?;
        is_claim(
            prefill.received().last().unwrap(),
            &fleet.decode[1],
            0,
            HELD,
        )?;
        scene.at_rest().await
    })
}

#[test]
fn a_session_whose_worker_is_lost_goes_on() -> Result<()> {
    run(async |trace| {
        let builder =
            pair(Spec::cuts())?.router(|router| router.session_affinity_ttl_secs = Some(600));
        let scene = Scene::start(&trace, builder).await?;
        let (fleet, prefill, holder) = (&scene.fleet, scene.prefill(), scene.holder());
        let ask = |seed| scene.ask(seed).header("x-dynamo-session-id", "a");
        fleet.ask(ask(1)).await?.complete()?;
        let gate = Gate::closed();
        prefill.next(Script::slow(&gate));
        let sent = fleet.send(ask(2))?;
        gate.reached_by(1).await?;
        is_claim(&prefill.received()[1], holder, 0, HELD)?;
        holder.leave();
        fleet.unrouted(0, holder).await?;
        gate.open();
        sent.answer().await?.complete()?;
        assert_eq!(fleet.decode[1].received().len(), 1);
        fleet.ask(ask(3)).await?.complete()?;
        assert_eq!(fleet.decode[1].received().len(), 2);
        scene.at_rest().await
    })
}

fn zone(name: &str, spec: Spec) -> Spec {
    Spec {
        zone: Some(name.to_owned()),
        ..spec
    }
}

#[test]
fn prefill_is_in_the_zone_of_the_claim() -> Result<()> {
    run(async |trace| {
        let fleet = Builder::new(WEIGHT)?
            .prefill(1, zone("a", Spec::cuts()))
            .prefill(1, zone("b", Spec::cuts()))
            .decode(1, zone("b", Spec::claims()))
            .decode(1, zone("a", Spec::claims()))
            .start(&trace)
            .await?;
        let prefix = prompt(1, HELD * BLOCK);
        hold(&fleet.decode[0], 0, &prefix)?;
        fleet.hold_known(&fleet.decode[0], 0, &prefix).await?;
        for seed in 0..6 {
            fleet
                .ask(Ask::new(&longer(&prefix, seed)))
                .await?
                .complete()?;
        }
        let told = fleet.prefill[1].received();
        assert_eq!((told.len(), fleet.prefill[0].received().len()), (6, 0));
        for got in told {
            is_claim(&got, &fleet.decode[0], 0, HELD)?;
        }
        assert_eq!(fleet.decode[0].received().len(), 6);
        // A prefill worker of the other zone that is named cannot send there.
        let named = Ask::new(&longer(&prefix, 9)).nvext("prefill_worker_id", fleet.prefill[0].id);
        fleet.ask(named).await?.complete()?;
        assert_eq!(fleet.prefill[0].received()[0].claim(), None);
        assert_eq!(refusal(&trace), "topology");
        assert_eq!(fleet.decode[1].received().len(), 1);
        at_rest(&fleet).await
    })
}

#[test]
fn an_offer_cut_for_a_worker_that_left_its_zone_goes_to_no_other() -> Result<()> {
    run(async |trace| {
        let fleet = Builder::new(WEIGHT)?
            .prefill(1, zone("a", Spec::cuts()))
            .decode(2, zone("a", Spec::claims()))
            .migrations(0)
            .start(&trace)
            .await?;
        let (prefill, holder) = (&fleet.prefill[0], &fleet.decode[0]);
        let prefix = prompt(1, HELD * BLOCK);
        hold(holder, 0, &prefix)?;
        fleet.hold_known(holder, 0, &prefix).await?;
        let gate = Gate::closed();
        prefill.next(Script::slow(&gate));
        let sent = fleet.send(Ask::new(&longer(&prefix, 1)))?;
        gate.reached_by(1).await?;
        is_claim(&prefill.received()[0], holder, 0, HELD)?;
        holder.leave();
        fleet.unrouted(0, holder).await?;
        gate.open();
        sent.answer().await?.complete()?;
        let told = prefill.received();
        ensure!(told.len() == 2, "prefill ran {} times", told.len());
        ensure!(told[1].claim().is_none());
        assert_eq!(voided(&trace), ["worker_gone"]);
        at_rest(&fleet).await
    })
}

#[test]
fn a_worker_in_a_zone_without_prefill_is_not_claimed_of() -> Result<()> {
    run(async |trace| {
        let fleet = Builder::new(WEIGHT)?
            .prefill(1, zone("a", Spec::cuts()))
            .decode(1, zone("b", Spec::claims()))
            .decode(1, zone("a", Spec::claims()))
            .start(&trace)
            .await?;
        let prefix = prompt(1, HELD * BLOCK);
        hold(&fleet.decode[0], 0, &prefix)?;
        fleet.hold_known(&fleet.decode[0], 0, &prefix).await?;
        fleet.ask(Ask::new(&longer(&prefix, 1))).await?.complete()?;
        assert_eq!(fleet.prefill[0].received()[0].claim(), None);
        assert_eq!(refusal(&trace), "topology");
        assert_eq!(fleet.decode[1].received().len(), 1);
        at_rest(&fleet).await
    })
}

#[test]
fn a_zone_whose_prefill_refuses_is_left() -> Result<()> {
    for script in [
        Script::refuse(ErrorClass::WorkerOverloaded),
        Script::refuse_late(ErrorClass::WorkerOverloaded),
        Script::new([Step::Begin, Step::Die]),
    ] {
        run(async |trace| {
            let fleet = Builder::new(WEIGHT)?
                .prefill(1, zone("a", Spec::cuts()))
                .prefill(1, zone("b", Spec::cuts()))
                .decode(1, zone("b", Spec::claims()))
                .decode(1, zone("a", Spec::claims()))
                .migrations(0)
                .start(&trace)
                .await?;
            let prefix = prompt(1, HELD * BLOCK);
            hold(&fleet.decode[0], 0, &prefix)?;
            fleet.hold_known(&fleet.decode[0], 0, &prefix).await?;
            fleet.prefill[1].always(script.clone());
            // Without the claim any zone may be chosen, this one again, too.
            let answer = fleet.ask(Ask::new(&longer(&prefix, 1))).await?;
            let told = fleet.prefill[1].received();
            is_claim(&told[0], &fleet.decode[0], 0, HELD)?;
            let other = fleet.prefill[0].received();
            ensure!(told.len() + other.len() == 2, "prefill was not tried again");
            if answer.is_complete() {
                ensure!(other[0].claim().is_none());
                ensure!(fleet.decode[1].received().len() == 1);
            } else {
                ensure!(told[1].claim().is_none(), "{}", answer.body);
            }
            at_rest(&fleet).await
        })?;
    }
    Ok(())
}

#[test]
fn conditional_disaggregation_decides_first() -> Result<()> {
    run(async |trace| {
        let builder = pair(Spec::cuts())?.router(|router| {
            let config = &mut router.kv_router_config;
            config.conditional_disagg_enabled = true;
            // Up to 40 new tokens decode prefills by itself, if most is there.
            config.conditional_disagg_eff_isl_threshold = 40;
            config.conditional_disagg_eff_isl_ratio_threshold = 1.0;
        });
        let scene = Scene::start(&trace, builder).await?;
        let (fleet, prefill, holder) = (&scene.fleet, scene.prefill(), scene.holder());
        fleet.ask(scene.ask(1)).await?.complete()?;
        assert_eq!((prefill.received().len(), holder.received().len()), (0, 1));
        assert!(holder.received()[0].claim().is_none());
        fleet.nothing_booked().await?;
        let mut long = scene.prefix.clone();
        long.extend(prompt(60, 30 * BLOCK));
        fleet.ask(Ask::new(&long)).await?.complete()?;
        is_claim(&prefill.received()[0], holder, 0, HELD)?;
        assert_eq!(holder.received().len(), 2);
        scene.at_rest().await
    })
}
