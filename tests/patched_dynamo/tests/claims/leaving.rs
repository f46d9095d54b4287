// SPDX-License-Identifier: Apache-2.0

//! Requests that end early: prefill refuses, decode hangs, the client goes away.

use anyhow::{Result, ensure};
use dynamo_runtime::error::ErrorClass;

use crate::fleet::{Builder, Gate, Outcome, Script, Spec, Step, Trace, run};
use crate::scene::{HELD, Scene, WEIGHT, is_claim, pair, voided};

/// Prefill fails as scripted, with as many migrations.
async fn refused(trace: &Trace, script: &Script, migrations: u32) -> Result<()> {
    let builder = Builder::new(WEIGHT)?
        .prefill(2, Spec::cuts())
        .decode(2, Spec::claims())
        .migrations(migrations);
    let scene = Scene::start(trace, builder).await?;
    let fleet = &scene.fleet;
    for prefill in &fleet.prefill {
        prefill.always(script.clone());
    }
    let answer = fleet.ask(scene.ask(1)).await?;
    ensure!(!answer.is_complete(), "{}", answer.body);
    ensure!(answer.status >= 400, "{}: {}", answer.status, answer.body);
    for decode in &fleet.decode {
        ensure!(decode.received().is_empty(), "decode got a leg");
    }
    // Each attempt booked, and gave it back; the last one may have found no prefill worker.
    let prefills = fleet.prefill.iter().flat_map(|worker| worker.received());
    let claims = prefills.filter(|got| got.claim().is_some()).count();
    ensure!(claims > 0, "no claim was tried");
    let void = voided(trace).len();
    ensure!(
        (claims..=claims + 1).contains(&void),
        "{claims} claims, {void} void"
    );
    scene.at_rest().await?;
    for prefill in &fleet.prefill {
        prefill.always(Script::answer());
    }
    // A worker that refuses gets nothing for a while.
    fleet.served().await?;
    fleet.ask(scene.ask(2)).await?.complete()?;
    ensure!(scene.holder().received().len() == 1);
    scene.at_rest().await
}

#[test]
fn what_prefill_refuses_leaves_no_booking() -> Result<()> {
    for (class, migrations) in [
        (ErrorClass::InvalidArgument, 0),
        (ErrorClass::WorkerOverloaded, 0),
        (ErrorClass::WorkerOverloaded, 2),
        (ErrorClass::ResourceExhausted, 1),
    ] {
        for script in [Script::refuse(class), Script::refuse_late(class)] {
            run(async |trace| refused(&trace, &script, migrations).await)?;
        }
    }
    Ok(())
}

#[test]
fn what_one_prefill_worker_refuses_another_does() -> Result<()> {
    for script in [
        Script::refuse(ErrorClass::WorkerOverloaded),
        Script::refuse_late(ErrorClass::WorkerOverloaded),
        Script::new([Step::Die]),
        Script::new([Step::Begin, Step::Die]),
    ] {
        run(async |trace| {
            let builder = Builder::new(WEIGHT)?
                .prefill(2, Spec::cuts())
                .decode(2, Spec::claims())
                .migrations(5);
            let scene = Scene::start(&trace, builder).await?;
            scene.prefill().always(script.clone());
            for seed in 0..4 {
                scene.fleet.ask(scene.ask(seed)).await?.complete()?;
                scene.at_rest().await?;
            }
            assert_eq!(scene.holder().received().len(), 4);
            for got in scene.fleet.prefill[1].received() {
                is_claim(&got, scene.holder(), 0, HELD)?;
            }
            scene.at_rest().await
        })?;
    }
    Ok(())
}

/// The client goes away while prefill is at a gate.
async fn leave_prefill(
    trace: &Trace,
    prefill: Spec,
    script: impl FnOnce(&Gate) -> Script,
) -> Result<()> {
    let scene = Scene::start(trace, pair(prefill)?).await?;
    let (fleet, prefill) = (&scene.fleet, scene.prefill());
    let gate = Gate::closed();
    prefill.next(script(&gate));
    let sent = fleet.send(scene.ask(1))?;
    gate.reached_by(1).await?;
    fleet.booked(scene.holder(), 1).await?;
    sent.disconnect();
    // Dynamo lets prefill end, whose blocks may be on their way; so the leg to them is sent, too.
    gate.open();
    prefill
        .until("an end", |all| all[0].outcome != Outcome::Running)
        .await?;
    scene.at_rest().await?;
    fleet.ask(scene.ask(2)).await?.complete()?;
    is_claim(prefill.received().last().unwrap(), scene.holder(), 0, HELD)?;
    assert!(fleet.decode[1].received().is_empty());
    scene.at_rest().await
}

#[test]
fn a_client_that_leaves_during_prefill_leaves_no_booking() -> Result<()> {
    for prefill in [Spec::default(), Spec::cuts()] {
        run(async |trace| leave_prefill(&trace, prefill.clone(), Script::slow).await)?;
    }
    Ok(())
}

#[test]
fn a_client_that_leaves_before_prefill_begins_leaves_no_booking() -> Result<()> {
    run(async |trace| {
        leave_prefill(&trace, Spec::cuts(), |gate| {
            Script::new([Step::Wait(gate.clone()), Step::Begin, Step::Finish])
        })
        .await
    })
}

#[test]
fn a_client_that_leaves_a_queue_leaves_no_booking() -> Result<()> {
    run(async |trace| {
        let builder = pair(Spec::cuts())?
            .router(|router| router.kv_router_config.router_queue_threshold = Some(0.001));
        let scene = Scene::start(&trace, builder).await?;
        let (fleet, prefill) = (&scene.fleet, scene.prefill());
        let gate = Gate::closed();
        prefill.always(Script::slow(&gate));
        let running = fleet.send(scene.ask(1))?;
        gate.reached_by(1).await?;
        let waiting = fleet.send(scene.ask(2))?;
        fleet.queued(1).await?;
        waiting.disconnect();
        gate.open();
        running.answer().await?.complete()?;
        scene.at_rest().await
    })
}

/// The client goes away while decode is at a gate.
async fn leave_decode(trace: &Trace, script: impl FnOnce(&Gate) -> Script) -> Result<()> {
    let scene = Scene::start(trace, pair(Spec::cuts())?).await?;
    let (fleet, holder) = (&scene.fleet, scene.holder());
    let gate = Gate::closed();
    holder.next(script(&gate));
    let sent = fleet.send(scene.ask(1))?;
    gate.reached_by(1).await?;
    fleet.booked(holder, 1).await?;
    sent.disconnect();
    holder
        .until("an aborted request", |all| {
            all[0].outcome == Outcome::Aborted
        })
        .await?;
    scene.at_rest().await?;
    assert!(fleet.decode[1].received().is_empty());
    assert_eq!(scene.prefill().received().len(), 1);
    fleet.ask(scene.ask(2)).await?.complete()?;
    scene.at_rest().await
}

#[test]
fn a_client_that_leaves_while_decode_hangs_leaves_no_booking() -> Result<()> {
    run(async |trace| {
        leave_decode(&trace, |gate| {
            Script::new([Step::Wait(gate.clone()), Step::Begin, Step::Finish])
        })
        .await
    })
}

#[test]
fn a_client_that_leaves_before_the_first_token_leaves_no_booking() -> Result<()> {
    run(async |trace| leave_decode(&trace, Script::slow).await)
}

#[test]
fn a_client_that_leaves_during_the_answer_leaves_no_booking() -> Result<()> {
    run(async |trace| leave_decode(&trace, Script::slow_after_a_token).await)
}

#[test]
fn an_answer_that_ends_in_prefill_leaves_no_booking() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(Spec::cuts())?).await?;
        scene.prefill().next(Script::new([Step::Begin, Step::End]));
        let answer = scene.fleet.ask(scene.ask(1)).await?;
        ensure!(answer.status == 200, "{}", answer.body);
        is_claim(&scene.prefill().received()[0], scene.holder(), 0, HELD)?;
        assert!(scene.holder().received().is_empty());
        assert_eq!(voided(&trace), ["ended_in_prefill"]);
        scene.at_rest().await
    })
}
