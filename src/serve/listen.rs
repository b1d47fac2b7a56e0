//! Accepts connections, within their bound, and serves HTTP/1.1 on each.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use super::app::App;
use super::socket::Socket;

/// Pause when the system has no room for a connection.
const PAUSE: Duration = Duration::from_millis(50);

/// Serves until `end` says so, then until all connections are done with what they do.
pub(super) async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    routes: Router,
    mut end: watch::Receiver<bool>,
) {
    let most = app.options.connections;
    let room = Arc::new(Semaphore::new(most));
    loop {
        let permit = room.clone().acquire_owned().await.expect("never closed");
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = end.wait_for(|end| *end) => break,
        };
        let Ok((stream, _)) = accepted else {
            // No descriptor is left, or the client has gone: what helps in both cases is to go on.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let connection = connection(stream, app.clone(), routes.clone(), end.clone());
        tokio::spawn(async move {
            connection.await;
            drop(permit);
        });
    }
    drop(listener);
    let _ = room.acquire_many(most as u32).await;
}

async fn connection(stream: TcpStream, app: Arc<App>, routes: Router, mut end: watch::Receiver<bool>) {
    // Tokens are small, and somebody waits for them.
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(Socket::new(stream, app.options.write_time));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(app.options.head_time);
    let mut connection = std::pin::pin!(http.serve_connection(io, TowerToHyperService::new(routes)));
    // An error is the client's: it has gone, was too slow, or does not speak HTTP, which it was told.
    tokio::select! {
        done = connection.as_mut() => return drop(done),
        _ = end.wait_for(|end| *end) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}
