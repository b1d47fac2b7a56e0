//! A connection whose client must read: writes that make no progress for too long fail, and the connection ends.

use std::future::Future;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

/// See the [module](self).
pub(super) struct Socket {
    stream: TcpStream,
    patience: Duration,
    /// Runs while a write waits for the client.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Socket {
    pub fn new(stream: TcpStream, patience: Duration) -> Socket {
        Socket { stream, patience, waiting: None }
    }

    /// Passes a write's result on, unless it has waited for too long.
    fn watch<T>(&mut self, cx: &mut Context<'_>, written: Poll<Result<T>>) -> Poll<Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let until = self.waiting.get_or_insert_with(|| Box::pin(sleep(self.patience)));
        debug_assert!(until.deadline() <= Instant::now() + self.patience);
        ready!(until.as_mut().poll(cx));
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client does not read")))
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, to)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends of a connection.
    async fn pair(patience: Duration) -> (Socket, TcpStream) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (client, accepted) =
            tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        (Socket::new(accepted.unwrap().0, patience), client.unwrap())
    }

    async fn write(socket: &mut Socket, mut left: usize) -> Result<()> {
        let bytes = vec![1; 1 << 20];
        while left > 0 {
            let some = &bytes[..left.min(bytes.len())];
            left -= std::future::poll_fn(|cx| Pin::new(&mut *socket).poll_write(cx, some)).await?;
        }
        Ok(())
    }

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
    }

    #[test]
    fn a_client_that_does_not_read_is_cut_off() {
        run(async {
            let (mut server, client) = pair(Duration::from_millis(50)).await;
            // Far more than the system's buffers hold.
            let error = write(&mut server, 256 << 20).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut);
            drop(client);
        });
    }

    #[test]
    fn a_client_that_reads_slowly_is_not() {
        run(async {
            let (mut server, client) = pair(Duration::from_secs(5)).await;
            let sent = 32 << 20;
            let writes = tokio::spawn(async move { write(&mut server, sent).await });
            let (mut bytes, mut got) = (vec![0; 1 << 20], 0);
            while got < sent {
                client.readable().await.unwrap();
                got += client.try_read(&mut bytes).unwrap_or(0);
            }
            writes.await.unwrap().unwrap();
        });
    }
}
