/* Until when a ZooKeeper session certainly lives: a leader, a follower, and a client that talks to the follower. Read it
 * beside aiodlock/backends/zookeeper/lifetime.py; docs/internals/model.md says what it covers.
 *
 * Time goes in half ticks. The leader asks the follower each half tick which sessions were heard of. A message between
 * the two may stay on its way for any time, for ever too, and is never reordered: so a link that is cut is in it. The
 * follower never gives up by itself: syncLimit is as long as the model's time.
 * With DEPOSED the others may elect a new leader at any moment, which gives the session its whole timeout; the old one,
 * with this follower alone, goes on, but no write is committed there.
 *
 * The client's rule is one of these:
 *   (none)       three writes, as lifetime.py has it
 *   NO_GAP       three writes, without the half tick between the first and the second
 *   TWO_WRITES   the second write's answer counts already
 *   WRITE        write sent + timeout
 *   PING         ping sent + timeout
 *   MINUS_TICKS  a ping each half tick, and write sent + timeout - 2 ticks
 *   SYNC_ONLY    three round trips to the leader that write nothing (zookeeper's sync)
 */
#ifndef T
#define T 4
#endif
#ifndef MAX
#define MAX 9
#endif
#ifdef NO_GAP
#define GAP 0
#else
#define GAP 1
#endif

mtype = { ASK, HEARD, WRITTEN, COMMIT };
chan up = [8] of { mtype, byte };     /* to the leader */
chan down = [16] of { mtype, byte };  /* to the follower */

byte now;
byte expires = T;    /* when the session ends at whoever is the leader */
bool expired;
bool heard;          /* the follower has heard of the session since it was last asked */
bool deposed;
byte answered;       /* the last write that the client has an answer to */
byte deadline = T;   /* the session was created now: the leader knows */

inline promise(sent) {
  if
  :: sent + T > deadline -> deadline = sent + T
  :: else
  fi;
  printf("the client: the session lives until %d\n", deadline);
  assert(!(expired && deadline > now))
}

active proctype Time() {
  do
  :: atomic {
       now < MAX -> now++;
       printf("the time is %d\n", now);
       if
       :: !expired && now >= expires -> expired = true; printf("the leader ends the session\n")
       :: else
       fi;
       if
       :: nfull(down) -> down!ASK(0)
       :: else
       fi;
#ifdef MINUS_TICKS
       heard = true;
#endif
       assert(!(expired && deadline > now))
     }
#ifdef DEPOSED
  :: atomic {
       !deposed && !expired -> deposed = true;
       if
       :: now + T > expires -> expires = now + T
       :: else
       fi;
       printf("the leader is deposed: the new one ends the session at %d\n", expires)
     }
#endif
  od
}

active proctype Leader() {
  byte number;
  do
  :: atomic {
       up?[HEARD(number)] -> up?HEARD(number);
       if
       :: number && !expired && !deposed ->
          expires = now + T;
          printf("the leader hears of the session: it ends at %d\n", expires)
       :: else
       fi;
       number = 0
     }
  :: atomic {
       up?[WRITTEN(number)] -> up?WRITTEN(number);
       if
#ifdef SYNC_ONLY
       :: !expired || deposed ->
#else
       :: !expired && !deposed ->
#endif
          down!COMMIT(number);
          printf("the leader has committed write %d\n", number)
       :: else
       fi;
       number = 0
     }
  od
}

active proctype Follower() {
  byte number;
  do
  :: atomic {
       nfull(up) && down?[ASK(number)] -> down?ASK(number);
       up!HEARD(heard);
       printf("the follower answers: %d\n", heard);
       heard = false
     }
  :: atomic {
       down?[COMMIT(number)] -> down?COMMIT(number);
       answered = number;
       printf("the follower answers the client: write %d\n", number);
       number = 0
     }
  od
}

inline write(number) {
  atomic {
    nfull(up) -> heard = true;
    up!WRITTEN(number);
    printf("the client: write %d\n", number)
  }
}

active proctype Client() {
  byte sent, first;
  do
#ifdef PING
  :: atomic { now < MAX -> heard = true; printf("the client: ping\n"); promise(now) }
#else
  :: atomic { answered = 0; sent = now };
     write(1);
     answered == 1;
#ifdef WRITE
     atomic { promise(sent) }
#else
#ifdef MINUS_TICKS
     atomic {
       if
       :: sent + T - 4 > deadline -> deadline = sent + T - 4
       :: else
       fi;
       printf("the client: the session lives until %d\n", deadline);
       assert(!(expired && deadline > now))
     }
#else
     first = now;
     now >= first + GAP;
     write(2);
     answered == 2;
#ifndef TWO_WRITES
     write(3);
     answered == 3;
#endif
     atomic { promise(sent); first = 0 }
#endif
#endif
#endif
  od
}
