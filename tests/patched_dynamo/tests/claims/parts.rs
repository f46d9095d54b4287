// SPDX-License-Identifier: Apache-2.0

//! The parts of the mock fleet, each seen at work, and what the first patch alone promises.

use anyhow::{Context, Result, ensure};
use dynamo_llm::worker_type::WorkerType;
use dynamo_runtime::error::ErrorClass;
use serde_json::json;

use crate::fleet::{Ask, Builder, Gate, Outcome, Script, Spec, Step, prompt, run};

const HASHING: &str = "kv_router.compute_block_hashes";

#[test]
fn a_prefix_goes_where_it_is_held() -> Result<()> {
    run(async |trace| {
        let fleet = Builder::new(2.0)?
            .prefill(1, Spec::default())
            .decode(2, Spec::default())
            .start(&trace)
            .await?;
        let prefix = prompt(1, 16 * 8);
        let holder = &fleet.decode[1];
        holder.store(0, &prefix)?;
        fleet.holds(0, holder, 0, &prefix, 16).await?;
        for seed in 2..5 {
            let mut asked = prefix.clone();
            asked.extend(prompt(seed, 20));
            let hashed = trace.spans(HASHING);
            let ask = Ask::new(&asked).nvext("extra_fields", vec!["worker_id"]);
            let answer = fleet.ask(ask).await?.complete()?;
            let chosen = answer.nvext("/worker_id/decode_worker_id");
            assert_eq!(chosen, Some(&json!(holder.id)), "{}", answer.body);
            fleet.nothing_booked().await?;
            // Once for both pools.
            assert_eq!(trace.spans(HASHING) - hashed, 1);
        }
        assert_eq!(holder.received().len(), 3);
        assert_eq!(fleet.decode[0].received().len(), 0);
        for (decode, prefill) in holder.received().iter().zip(fleet.prefill[0].received()) {
            assert!(prefill.order < decode.order);
            assert_eq!(prefill.id, decode.id);
            assert_eq!(prefill.claim(), None);
            assert_eq!(decode.outcome, Outcome::Finished);
            assert_eq!(
                decode
                    .request
                    .pointer("/prefill_result/disaggregated_params"),
                Some(&json!({ "from": "prefill 0" }))
            );
        }
        Ok(())
    })
}

#[test]
fn ranks_hold_blocks_of_their_own_until_removed_or_cleared() -> Result<()> {
    run(async |trace| {
        let ranks = Spec {
            ranks: 2,
            runtime_data: [("some_key".to_owned(), json!({"version": 1}))].into(),
            ..Spec::default()
        };
        let mut fleet = Builder::new(2.0)?
            .prefill(1, Spec::default())
            .decode(1, ranks)
            .start(&trace)
            .await?;
        let prefix = prompt(1, 4 * 8);
        let decode = fleet.decode[0].clone();
        decode.store_after(1, None, &prefix[..16], &[71, 72])?;
        decode.store_after(1, Some(72), &prefix[16..], &[73, 74])?;
        fleet.holds(0, &decode, 1, &prefix, 4).await?;
        fleet.holds(0, &decode, 0, &prefix, 0).await?;
        fleet.ask(Ask::new(&prefix)).await?.complete()?;
        assert_eq!(decode.received()[0].rank(), Some(1));
        decode.remove(1, &[73, 74])?;
        fleet.holds(0, &decode, 1, &prefix, 2).await?;
        // A frontend that was not there yet asks the worker's local indexer.
        fleet.start_frontend().await?;
        fleet.served().await?;
        fleet.holds(1, &decode, 1, &prefix, 2).await?;
        decode.clear(1)?;
        for frontend in 0..2 {
            fleet.holds(frontend, &decode, 1, &prefix, 0).await?;
        }
        fleet.nothing_booked().await
    })
}

#[test]
fn a_slow_prefill_is_booked_until_it_ends() -> Result<()> {
    run(async |trace| {
        let fleet = Builder::new(2.0)?
            .prefill(1, Spec::default())
            .decode(1, Spec::default())
            .start(&trace)
            .await?;
        let (prefill, decode) = (&fleet.prefill[0], &fleet.decode[0]);
        let gate = Gate::closed();
        prefill.next(Script::slow(&gate));
        let sent = fleet.send(Ask::new(&prompt(1, 100)))?;
        gate.reached_by(1).await?;
        fleet.booked(prefill, 1).await?;
        assert_eq!(fleet.load(prefill).await?, 100.0);
        assert_eq!(prefill.received()[0].outcome, Outcome::Running);
        assert!(decode.received().is_empty());
        gate.open();
        sent.answer().await?.complete()?;
        fleet.nothing_booked().await?;
        assert_eq!(fleet.load(prefill).await?, 0.0);
        Ok(())
    })
}

#[test]
fn what_a_worker_refuses_ends_and_stays_nowhere() -> Result<()> {
    run(async |trace| {
        let fleet = Builder::new(2.0)?
            .prefill(1, Spec::default())
            .decode(2, Spec::default())
            .migrations(3)
            .start(&trace)
            .await?;
        let prefill = &fleet.prefill[0];
        for script in [
            Script::refuse(ErrorClass::InvalidArgument),
            Script::refuse_late(ErrorClass::InvalidArgument),
        ] {
            prefill.next(script);
            let answer = fleet.ask(Ask::new(&prompt(1, 50))).await?;
            assert!(!answer.is_complete(), "{}", answer.body);
            assert_eq!(prefill.received().last().unwrap().outcome, Outcome::Refused);
            fleet.nothing_booked().await?;
        }
        for decode in &fleet.decode {
            assert!(decode.received().is_empty());
        }
        // Overloaded there, the request goes on elsewhere.
        let (decode, asked) = (&fleet.decode[0], prompt(2, 50));
        decode.store(0, &asked)?;
        fleet.holds(0, decode, 0, &asked, 6).await?;
        decode.next(Script::refuse(ErrorClass::WorkerOverloaded));
        fleet.ask(Ask::new(&asked)).await?.complete()?;
        assert_eq!(decode.received()[0].outcome, Outcome::Refused);
        assert_eq!(fleet.decode[1].received().len(), 1);
        fleet.nothing_booked().await
    })
}

#[test]
fn a_client_that_leaves_is_noticed_by_the_worker() -> Result<()> {
    run(async |trace| {
        let fleet = Builder::new(2.0)?
            .prefill(1, Spec::default())
            .decode(1, Spec::default())
            .start(&trace)
            .await?;
        let decode = &fleet.decode[0];
        let gate = Gate::closed();
        decode.next(Script::slow_after_a_token(&gate));
        let mut sent = fleet.send(Ask::new(&prompt(1, 50)))?;
        sent.messages(1).await?;
        fleet.booked(decode, 1).await?;
        sent.disconnect();
        decode
            .until("an aborted request", |all| {
                all[0].outcome == Outcome::Aborted
            })
            .await?;
        fleet.nothing_booked().await
    })
}

#[test]
fn a_request_of_a_dead_worker_goes_on_with_another() -> Result<()> {
    run(async |trace| {
        let mut fleet = Builder::new(2.0)?
            .prefill(1, Spec::default())
            .decode(2, Spec::default())
            .migrations(3)
            .start(&trace)
            .await?;
        let prefix = prompt(1, 16 * 8);
        let dying = fleet.decode[0].clone();
        dying.store(0, &prefix)?;
        fleet.holds(0, &dying, 0, &prefix, 16).await?;
        let gate = Gate::closed();
        dying.next(Script::slow_after_a_token(&gate));
        let sent = fleet.send(Ask::new(&prefix))?;
        gate.reached_by(1).await?;
        dying.die();
        dying.leave();
        sent.answer().await?.complete()?;
        assert_eq!(dying.received()[0].outcome, Outcome::Died);
        let id = dying.received()[0].id.clone();
        let other = fleet.worker_of(WorkerType::Decode, &id);
        ensure!(other.is_some(), "no worker went on with {id}");
        assert_eq!(fleet.decode[1].received().len(), 1);
        fleet.nothing_booked().await?;
        // Another takes its place; the first request that it gets kills it.
        let late = fleet
            .start_worker(WorkerType::Decode, Spec::default())
            .await?;
        fleet.served().await?;
        late.store(0, &prefix)?;
        fleet.holds(0, &late, 0, &prefix, 16).await?;
        late.always(Script::new([Step::Die]));
        fleet.ask(Ask::new(&prefix)).await?.complete()?;
        late.until_received(1).await?;
        fleet.nothing_booked().await
    })
}

#[test]
fn a_draining_worker_finishes_what_it_runs() -> Result<()> {
    run(async |trace| {
        let fleet = Builder::new(2.0)?
            .prefill(1, Spec::default())
            .decode(2, Spec::default())
            .start(&trace)
            .await?;
        let prefix = prompt(1, 16 * 8);
        let leaving = &fleet.decode[0];
        leaving.store(0, &prefix)?;
        fleet.holds(0, leaving, 0, &prefix, 16).await?;
        let gate = Gate::closed();
        leaving.next(Script::slow_after_a_token(&gate));
        let mut sent = fleet.send(Ask::new(&prefix))?;
        // Only what has begun is finished.
        sent.messages(1).await?;
        leaving.leave();
        fleet.unrouted(0, leaving).await?;
        fleet.ask(Ask::new(&prefix)).await?.complete()?;
        assert_eq!(fleet.decode[1].received().len(), 1);
        gate.open();
        sent.answer().await?.complete()?;
        assert_eq!(leaving.received()[0].outcome, Outcome::Finished);
        fleet.nothing_booked().await
    })
}

#[test]
fn replicas_hear_of_each_others_bookings() -> Result<()> {
    run(async |trace| {
        let fleet = Builder::new(2.0)?
            .prefill(1, Spec::default())
            .decode(2, Spec::default())
            .frontends(2)
            .start(&trace)
            .await?;
        let gate = Gate::closed();
        for decode in &fleet.decode {
            decode.always(Script::slow(&gate));
        }
        let first = fleet.send_to(0, Ask::new(&prompt(1, 800)))?;
        gate.reached_by(1).await?;
        let busy = fleet
            .decode
            .iter()
            .find(|worker| !worker.received().is_empty());
        let busy = busy.context("no decode worker got the request")?;
        fleet.booked(busy, 1).await?;
        let second = fleet.send_to(1, Ask::new(&prompt(2, 800)))?;
        gate.reached_by(2).await?;
        assert_eq!(busy.received().len(), 1);
        gate.open();
        first.answer().await?.complete()?;
        second.answer().await?.complete()?;
        fleet.nothing_booked().await
    })
}

#[test]
fn decode_stays_in_the_zone_of_prefill() -> Result<()> {
    run(async |trace| {
        let zone = |name: &str| Spec {
            zone: Some(name.to_owned()),
            ..Spec::default()
        };
        let fleet = Builder::new(2.0)?
            .prefill(1, zone("a"))
            .decode(1, zone("a"))
            .decode(1, zone("b"))
            .start(&trace)
            .await?;
        let prefix = prompt(1, 16 * 8);
        fleet.decode[1].store(0, &prefix)?;
        fleet.holds(0, &fleet.decode[1], 0, &prefix, 16).await?;
        fleet.ask(Ask::new(&prefix)).await?.complete()?;
        assert_eq!(fleet.decode[0].received().len(), 1);
        fleet.nothing_booked().await
    })
}

#[test]
fn a_session_stays_with_its_workers() -> Result<()> {
    run(async |trace| {
        let fleet = Builder::new(2.0)?
            .prefill(1, Spec::default())
            .decode(2, Spec::default())
            .router(|router| router.session_affinity_ttl_secs = Some(600))
            .start(&trace)
            .await?;
        let ask = |seed| {
            Ask::new(&prompt(seed, 50))
                .header("x-dynamo-session-id", "a")
                .field("max_tokens", 2)
        };
        fleet.ask(ask(1)).await?.complete()?;
        let used = fleet
            .decode
            .iter()
            .position(|worker| !worker.received().is_empty());
        let used = used.context("no decode worker got the request")?;
        let other = prompt(2, 50);
        fleet.decode[1 - used].store(0, &other)?;
        fleet
            .holds(0, &fleet.decode[1 - used], 0, &other, 6)
            .await?;
        fleet.ask(ask(2)).await?.complete()?;
        let received = fleet.decode[used].received();
        assert_eq!(received.len(), 2);
        let limit = received[1].request.pointer("/stop_conditions/max_tokens");
        assert_eq!(limit, Some(&json!(2)));
        fleet.nothing_booked().await
    })
}
