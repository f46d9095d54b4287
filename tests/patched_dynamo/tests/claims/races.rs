// SPDX-License-Identifier: Apache-2.0

//! The decode worker of a claim is lost between the claim and its decode leg.

use anyhow::{Context, Result, ensure};
use dynamo_runtime::error::ErrorClass;
use serde_json::json;

use crate::fleet::{
    Ask, Builder, Gate, Outcome, Received, Script, Spec, Step, Trace, Worker, prompt, run, until,
};
use crate::scene::{HELD, Scene, WEIGHT, is_claim, longer, pair, voided};

/// What becomes of the worker of a claim while prefill runs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lost {
    /// It is dead; discovery does not know yet.
    Dies,
    /// It is dead, and the router has met that.
    IsKnownDead,
    /// It is dead, and its lease is over.
    IsGone,
    /// It leaves discovery in good order.
    Drains,
    /// It refuses what comes.
    Refuses,
}

/// Prefill once more, or the offer that is there.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Offer {
    Whole,
    Cut,
}

/// A request whose worker is lost while it waits in prefill goes on with the other one.
async fn lose(trace: &Trace, lost: Lost, offer: Offer, migrations: u32) -> Result<()> {
    let prefill = match offer {
        Offer::Whole => Spec::default(),
        Offer::Cut => Spec::cuts(),
    };
    let scene = Scene::start(trace, pair(prefill)?.migrations(migrations)).await?;
    let (fleet, holder, other) = (&scene.fleet, scene.holder(), &scene.fleet.decode[1]);
    let gate = Gate::closed();
    let sent = scene.claimed(&gate).await?;
    fleet.booked(holder, 1).await?;
    match lost {
        Lost::Dies => holder.die(),
        Lost::IsKnownDead => {
            holder.die();
            // Prefill answers this one at once.
            let found = Ask::new(&prompt(77, 40))
                .decode(holder, 0)
                .prefill(scene.prefill(), 0);
            let answer = fleet.ask(found).await?;
            ensure!(
                !answer.is_complete(),
                "a dead worker answered: {}",
                answer.body
            );
        }
        Lost::IsGone => {
            holder.die();
            holder.leave();
            fleet.unrouted(0, holder).await?;
        }
        Lost::Drains => {
            holder.leave();
            fleet.unrouted(0, holder).await?;
        }
        Lost::Refuses => holder.always(Script::refuse(ErrorClass::WorkerOverloaded)),
    }
    let before = (
        scene.prefill().received().len(),
        holder.received().len(),
        other.received().len(),
    );
    gate.open();
    sent.answer().await?.complete()?;
    let prefills = scene.prefill().received();
    let legs = other.received();
    ensure!(
        legs.len() == before.2 + 1,
        "{} legs at the other worker",
        legs.len()
    );
    let leg = legs.last().context("no leg")?;
    ensure!(leg.outcome == Outcome::Finished);
    ensure!(
        leg.offer() == Some(&json!({"from": "prefill 0"})),
        "{:?}",
        leg.offer()
    );
    let again = match offer {
        Offer::Whole => 0,
        Offer::Cut => 1,
    };
    ensure!(
        prefills.len() == before.0 + again,
        "prefill ran {} times more",
        prefills.len() - before.0
    );
    if offer == Offer::Cut {
        let second = prefills.last().context("no prefill")?;
        ensure!(
            second.claim().is_none(),
            "the second prefill has a claim, too"
        );
        // The lost worker may have got the offer that is taken back, or nobody.
        ensure!(
            second
                .release()
                .is_some_and(|id| id.starts_with("prefill 0 for "))
        );
        ensure!(second.request["token_ids"] == leg.request["token_ids"]);
        ensure!(second.id == leg.id, "another request");
    }
    let met = holder.received().len() - before.1;
    match lost {
        Lost::Dies | Lost::Refuses => ensure!(met == 1, "the lost worker got {met} legs"),
        Lost::IsKnownDead | Lost::IsGone | Lost::Drains => {
            ensure!(met == 0, "the lost worker got {met} legs");
            ensure!(voided(trace).len() == 1, "{:?}", voided(trace));
        }
    }
    scene.at_rest().await?;
    // What comes next is as if nothing had been.
    if lost != Lost::Refuses {
        fleet.ask(scene.ask(5)).await?.complete()?;
        let last = scene.prefill().received();
        ensure!(last.last().is_some_and(|got| got.claim().is_none()));
    }
    scene.at_rest().await
}

#[test]
fn a_worker_that_died_unseen_is_replaced() -> Result<()> {
    run(async |trace| {
        lose(&trace, Lost::Dies, Offer::Whole, 0).await?;
        lose(&trace, Lost::Dies, Offer::Cut, 0).await
    })
}

#[test]
fn a_worker_that_is_known_to_be_dead_is_not_asked() -> Result<()> {
    run(async |trace| lose(&trace, Lost::IsKnownDead, Offer::Whole, 0).await)?;
    run(async |trace| lose(&trace, Lost::IsKnownDead, Offer::Cut, 0).await)
}

#[test]
fn a_worker_that_is_gone_is_replaced() -> Result<()> {
    run(async |trace| lose(&trace, Lost::IsGone, Offer::Whole, 0).await)?;
    run(async |trace| lose(&trace, Lost::IsGone, Offer::Cut, 1).await)
}

#[test]
fn a_worker_that_drains_gets_no_more() -> Result<()> {
    run(async |trace| lose(&trace, Lost::Drains, Offer::Whole, 1).await)?;
    run(async |trace| lose(&trace, Lost::Drains, Offer::Cut, 0).await)
}

#[test]
fn a_worker_that_refuses_is_replaced() -> Result<()> {
    run(async |trace| lose(&trace, Lost::Refuses, Offer::Whole, 0).await)?;
    run(async |trace| lose(&trace, Lost::Refuses, Offer::Cut, 0).await)
}

#[test]
fn a_worker_that_is_not_eligible_any_more_is_replaced() -> Result<()> {
    for prefill in [Spec::default(), Spec::cuts()] {
        run(async |trace| {
            let tainted = |spec: Spec| Spec {
                taints: vec!["fast".to_owned()],
                ..spec
            };
            let again = usize::from(prefill.cuts);
            let builder = Builder::new(WEIGHT)?
                .prefill(1, tainted(prefill.clone()))
                .decode(2, tainted(Spec::claims()))
                .migrations(0);
            let scene = Scene::start(&trace, builder).await?;
            let (fleet, holder) = (&scene.fleet, scene.holder());
            let on_fast =
                |ask: Ask| ask.nvext("routing_constraints", json!({"required_taints": ["fast"]}));
            let gate = Gate::closed();
            scene.prefill().next(Script::slow(&gate));
            let sent = fleet.send(on_fast(scene.ask(1)))?;
            gate.reached_by(1).await?;
            is_claim(&scene.prefill().received()[0], holder, 0, HELD)?;
            holder.taint(&["slow"]).await?;
            until("the frontend knows", async || {
                let ask = on_fast(scene.ask(2)).decode(holder, 0).query_only();
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
            assert_eq!(voided(&trace), ["worker_not_eligible"]);
            assert!(holder.received().is_empty());
            assert_eq!(scene.prefill().received().len(), 1 + again);
            // Who does not ask for it is sent there as before.
            fleet.ask(scene.ask(3)).await?.complete()?;
            assert_eq!(holder.received().len(), 1);
            scene.at_rest().await
        })?;
    }
    Ok(())
}

#[test]
fn a_worker_alone_is_not_replaced_and_the_request_ends() -> Result<()> {
    for prefill in [Spec::default(), Spec::cuts()] {
        run(async |trace| {
            let builder = Builder::new(WEIGHT)?
                .prefill(1, prefill.clone())
                .decode(1, Spec::claims());
            let scene = Scene::start(&trace, builder).await?;
            let gate = Gate::closed();
            let sent = scene.claimed(&gate).await?;
            scene
                .holder()
                .always(Script::refuse(ErrorClass::WorkerOverloaded));
            gate.open();
            let answer = sent.answer().await?;
            ensure!(
                !answer.is_complete() && answer.status >= 500,
                "{}: {}",
                answer.status,
                answer.body
            );
            scene.at_rest().await?;
            scene.holder().always(Script::answer());
            // A worker that refuses gets nothing for a while.
            scene.fleet.served().await?;
            scene.fleet.ask(scene.ask(3)).await?.complete()?;
            scene.at_rest().await
        })?;
    }
    Ok(())
}

/// A worker whose answer breaks off.
async fn break_off(trace: &Trace, script: Script, lives: bool) -> Result<()> {
    let scene = Scene::start(trace, pair(Spec::cuts())?.migrations(3)).await?;
    let (holder, other) = (scene.holder(), &scene.fleet.decode[1]);
    holder.next(script);
    let answer = scene.fleet.ask(scene.ask(1)).await?.complete()?;
    // Prefill runs again, for what came is part of the prompt now.
    let prefills = scene.prefill().received();
    assert_eq!(prefills.len(), 2, "{}", answer.body);
    is_claim(&prefills[0], holder, 0, HELD)?;
    let (tokens, again) = (
        &prefills[0].request["token_ids"],
        &prefills[1].request["token_ids"],
    );
    let (tokens, again) = (tokens.as_array().unwrap(), again.as_array().unwrap());
    ensure!(again.starts_with(tokens), "another prompt");
    if !lives {
        assert_eq!(other.received().len(), 1);
        assert_eq!(prefills[1].claim(), None);
    }
    scene.at_rest().await
}

#[test]
fn an_answer_that_breaks_off_goes_on_with_a_claim_of_its_own() -> Result<()> {
    for (script, lives) in [
        (Script::refuse_late(ErrorClass::WorkerOverloaded), true),
        (
            Script::new([
                Step::Begin,
                Step::Token,
                Step::Refuse(ErrorClass::Disconnected),
            ]),
            true,
        ),
        (Script::new([Step::Begin, Step::Token, Step::Die]), false),
    ] {
        run(async |trace| break_off(&trace, script.clone(), lives).await)?;
    }
    Ok(())
}

#[test]
fn without_migrations_an_answer_that_breaks_off_is_an_error() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(Spec::cuts())?.migrations(0)).await?;
        let broken = Script::new([
            Step::Begin,
            Step::Token,
            Step::Refuse(ErrorClass::Disconnected),
        ]);
        scene.holder().next(broken);
        let answer = scene.fleet.ask(scene.ask(1)).await?;
        ensure!(!answer.is_complete(), "{}", answer.body);
        assert_eq!(scene.prefill().received().len(), 1);
        assert!(scene.fleet.decode[1].received().is_empty());
        scene.at_rest().await
    })
}

#[test]
fn many_claims_of_a_lost_worker_all_go_on() -> Result<()> {
    run(async |trace| {
        let builder = pair(Spec::cuts())?
            .migrations(0)
            .frontends(2)
            .router(|router| router.kv_router_config.router_queue_threshold = None);
        let scene = Scene::start(&trace, builder).await?;
        let (fleet, holder) = (&scene.fleet, scene.holder());
        let gate = Gate::closed();
        scene.prefill().always(Script::slow(&gate));
        let sent: Vec<_> = (0..8)
            .map(|number| {
                let ask = Ask::new(&longer(&scene.prefix, number));
                fleet.send_to(usize::from(number % 2 == 1), ask)
            })
            .collect::<Result<_>>()?;
        gate.reached_by(8).await?;
        let first = scene.prefill().received();
        let claims = claims_of(holder, &first);
        ensure!(claims > 0, "nobody chose the holder");
        holder.leave();
        for frontend in 0..2 {
            fleet.unrouted(frontend, holder).await?;
        }
        gate.open();
        for sent in sent {
            sent.answer().await?.complete()?;
        }
        assert_eq!(scene.prefill().received().len(), 8 + claims);
        assert_eq!(fleet.decode[1].received().len(), 8);
        assert!(holder.received().is_empty());
        scene.at_rest().await
    })
}

fn claims_of(worker: &Worker, received: &[Received]) -> usize {
    let of = |got: &&Received| got.claimed("decode_worker_id") == Some(worker.id);
    received.iter().filter(of).count()
}
