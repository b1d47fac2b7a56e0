//! What is delivered to whoever has submitted a request: that it is accepted or refused, then its events.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::{Client, Command};
use crate::Error;
use crate::engine::batcher::{Event, Finish, Request};
use crate::program::RequestId;

/// What happens to a request that was submitted by [`Client::send`].
#[derive(Debug)]
pub enum Delivery {
    /// It is in flight; events follow.
    Accepted(RequestId),
    /// It is not, for this reason; nothing follows.
    Refused(Error),
    /// The next event; nothing follows the end.
    Event(Event),
}

/// The receiving end of a request's deliveries, on the service's thread.
pub(super) struct Deliveries {
    deliver: Box<dyn FnMut(Delivery) -> bool + Send>,
}

impl Deliveries {
    pub fn new(deliver: impl FnMut(Delivery) -> bool + Send + 'static) -> Deliveries {
        Deliveries { deliver: Box::new(deliver) }
    }

    /// Delivers, and returns whether anybody listens.
    pub fn send(&mut self, delivery: Delivery) -> bool {
        (self.deliver)(delivery)
    }
}

/// A request in flight without a stream. Dropping it cancels the request, unless it has ended. It counts as in flight until
/// it is dropped, since its reader may still hold its tokens.
pub struct Flight {
    client: Client,
    id: Arc<OnceLock<RequestId>>,
    over: Arc<AtomicBool>,
}

impl Flight {
    /// Submits a request that is counted already.
    pub(super) fn take_off(
        client: Client,
        request: Request,
        deliver: impl FnMut(Delivery) -> bool + Send + 'static,
    ) -> Flight {
        let (id, over) = (Arc::new(OnceLock::new()), Arc::new(AtomicBool::new(false)));
        let ends = Ends { client: client.clone(), deliver, id: id.clone(), over: over.clone() };
        // If the thread has ended, what is sent is dropped, which delivers the end.
        let mut ends = ends;
        let deliver = move |delivery| ends.deliver(delivery);
        let _ = client.sender.send(Command::Submit(Box::new(request), Deliveries::new(deliver)));
        Flight { client, id, over }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if !self.over.load(Ordering::Relaxed) {
            // Commands are obeyed in their order, so the id is known by then if the request was accepted.
            let _ = self.client.sender.send(Command::Drop(self.id.clone()));
        }
        self.client.one_less();
    }
}

/// Sees to it that every request has an end: if it is dropped before that, the service has ended.
struct Ends<D: FnMut(Delivery) -> bool> {
    client: Client,
    deliver: D,
    id: Arc<OnceLock<RequestId>>,
    over: Arc<AtomicBool>,
}

impl<D: FnMut(Delivery) -> bool> Ends<D> {
    fn deliver(&mut self, delivery: Delivery) -> bool {
        match &delivery {
            Delivery::Accepted(id) => drop(self.id.set(*id)),
            Delivery::Refused(_) | Delivery::Event(Event::End(_)) => self.over.store(true, Ordering::Relaxed),
            Delivery::Event(Event::Cached(_) | Event::Prompt(_) | Event::Token(_)) => {}
        }
        (self.deliver)(delivery)
    }
}

impl<D: FnMut(Delivery) -> bool> Drop for Ends<D> {
    fn drop(&mut self) {
        if !self.over.swap(true, Ordering::Relaxed) {
            let why = self.client.shared.unavailable();
            let last = match self.id.get() {
                Some(_) => Delivery::Event(Event::End(Finish::Failed(Arc::new(why)))),
                None => Delivery::Refused(why),
            };
            (self.deliver)(last);
        }
    }
}
