// SPDX-License-Identifier: Apache-2.0

//! Old workers beside new ones, data-parallel ranks, and workers that a client names.

use anyhow::{Result, ensure};

use crate::fleet::{Ask, Builder, Gate, Script, Spec, prompt, run};
use crate::scene::{BLOCK, HELD, Scene, WEIGHT, at_rest, hold, is_claim, longer, pair, refusal};

#[test]
fn old_and_new_workers_serve_together() -> Result<()> {
    run(async |trace| {
        let fleet = Builder::new(WEIGHT)?
            .prefill(1, Spec::cuts())
            .decode(1, Spec::claims())
            .decode(1, Spec::default())
            .start(&trace)
            .await?;
        let (new, old) = (&fleet.decode[0], &fleet.decode[1]);
        let (of_new, of_old) = (prompt(1, HELD * BLOCK), prompt(2, HELD * BLOCK));
        hold(new, 0, &of_new)?;
        hold(old, 0, &of_old)?;
        // Both hold this; the old one more of it.
        let of_both = prompt(3, HELD * BLOCK);
        hold(new, 0, &of_both[..4 * BLOCK])?;
        hold(old, 0, &of_both)?;
        for (worker, prefix, blocks) in [
            (new, &of_new, HELD),
            (old, &of_old, HELD),
            (new, &of_both, 4),
            (old, &of_both, HELD),
        ] {
            fleet.holds(0, worker, 0, prefix, blocks).await?;
        }
        let prefill = &fleet.prefill[0];
        fleet.ask(Ask::new(&longer(&of_new, 1))).await?.complete()?;
        is_claim(prefill.received().last().unwrap(), new, 0, HELD)?;
        assert_eq!(new.received().len(), 1);
        for prefix in [&of_old, &of_both] {
            fleet.ask(Ask::new(&longer(prefix, 1))).await?.complete()?;
            assert_eq!(prefill.received().last().unwrap().claim(), None);
            assert_eq!(refusal(&trace), "not_advertised");
        }
        assert_eq!(old.received().len(), 2);
        at_rest(&fleet).await
    })
}

#[test]
fn a_claim_is_of_the_rank_that_decodes() -> Result<()> {
    run(async |trace| {
        let ranks = |spec: Spec| Spec { ranks: 2, ..spec };
        let fleet = Builder::new(WEIGHT)?
            .prefill(1, ranks(Spec::cuts()))
            .decode(1, ranks(Spec::claims()))
            .start(&trace)
            .await?;
        let (prefill, decode) = (&fleet.prefill[0], &fleet.decode[0]);
        let (of_0, of_1) = (prompt(1, HELD * BLOCK), prompt(2, HELD * BLOCK));
        hold(decode, 0, &of_0[..6 * BLOCK])?;
        hold(decode, 1, &of_1)?;
        // Rank 0 holds the start of it, rank 1 all.
        hold(decode, 0, &of_1[..3 * BLOCK])?;
        for (rank, prefix, blocks) in [
            (0, &of_0, 6),
            (1, &of_0, 0),
            (0, &of_1, 3),
            (1, &of_1, HELD),
        ] {
            fleet.holds(0, decode, rank, prefix, blocks).await?;
        }
        for (prefix, rank, blocks) in [(&of_1, 1, HELD), (&of_0, 0, 6), (&of_1, 1, HELD)] {
            fleet.ask(Ask::new(&longer(prefix, 1))).await?.complete()?;
            is_claim(prefill.received().last().unwrap(), decode, rank, blocks)?;
            let leg = decode.received();
            let leg = leg.last().unwrap();
            assert_eq!(leg.rank(), Some(u64::from(rank)));
            // The rank of prefill is another matter.
            let of_prefill = leg.request.pointer("/routing/prefill_dp_rank");
            ensure!(of_prefill.is_none_or(|rank| rank.is_null() || rank.as_u64() < Some(2)));
        }
        // A rank that is named is claimed of, even if the other one holds more.
        let named = Ask::new(&longer(&of_1, 2))
            .decode(decode, 0)
            .prefill(prefill, 1);
        fleet.ask(named).await?.complete()?;
        is_claim(prefill.received().last().unwrap(), decode, 0, 3)?;
        assert_eq!(decode.received().last().unwrap().rank(), Some(0));
        assert_eq!(prefill.received().last().unwrap().rank(), Some(1));
        at_rest(&fleet).await
    })
}

#[test]
fn a_decode_worker_that_is_named_leaves_prefill_free() -> Result<()> {
    run(async |trace| {
        let builder = Builder::new(WEIGHT)?
            .prefill(2, Spec::cuts())
            .decode(2, Spec::claims());
        let scene = Scene::start(&trace, builder).await?;
        let (fleet, holder, other) = (&scene.fleet, scene.holder(), &scene.fleet.decode[1]);
        let named = |worker: u64| scene.ask(1).nvext("decode_worker_id", worker);
        fleet.ask(named(holder.id)).await?.complete()?;
        assert_eq!(holder.received().len(), 1);
        let prefills = || fleet.prefill.iter().flat_map(|worker| worker.received());
        is_claim(&prefills().last().unwrap(), holder, 0, HELD)?;
        // One that holds nothing is honoured, too.
        fleet.ask(named(other.id)).await?.complete()?;
        assert_eq!(other.received().len(), 1);
        assert_eq!(prefills().filter(|got| got.claim().is_none()).count(), 1);
        // One that nobody knows is the client's error, and no prefill is made for it.
        let answer = fleet.ask(named(12345)).await?;
        ensure!(
            (400..500).contains(&answer.status),
            "{}: {}",
            answer.status,
            answer.body
        );
        assert_eq!(prefills().count(), 2);
        // Dynamo's header names the worker of both hops; a decode worker cannot be that.
        for worker in [12345, holder.id] {
            let named = scene.ask(2).header("x-dynamo-worker-instance-id", worker);
            let answer = fleet.ask(named).await?;
            ensure!(
                (400..500).contains(&answer.status),
                "{}: {}",
                answer.status,
                answer.body
            );
            assert_eq!(prefills().count(), 2);
        }
        scene.at_rest().await
    })
}

#[test]
fn a_named_worker_that_is_lost_is_not_replaced() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(Spec::cuts())?.migrations(3)).await?;
        let (fleet, holder) = (&scene.fleet, scene.holder());
        let gate = Gate::closed();
        scene.prefill().next(Script::slow(&gate));
        let sent = fleet.send(scene.ask(1).nvext("decode_worker_id", holder.id))?;
        gate.reached_by(1).await?;
        is_claim(&scene.prefill().received()[0], holder, 0, HELD)?;
        holder.leave();
        fleet.unrouted(0, holder).await?;
        gate.open();
        let answer = sent.answer().await?;
        ensure!(
            !answer.is_complete() && answer.status >= 400,
            "{}: {}",
            answer.status,
            answer.body
        );
        assert!(fleet.decode[1].received().is_empty());
        scene.at_rest().await
    })
}
