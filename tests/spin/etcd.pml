/* The recipe on etcd for one name (aiodlock/backends/etcd/recipe.py). docs/internals/model.md says what is explored.
 *
 * A transaction is one step, with one of these outcomes. All but the first spend one of FAULTS:
 *   answered | the answer is lost | the request is lost | the request is carried out late, its answer is not heard
 * A client knows the name as it was at some moment (its view); a later event brings the view up to date. While two
 * requests that conflict stand before its own, it hears of its own key and of the last but one of them alone (`far`).
 *
 * Each request has a client of its own (but those in ONE), with a lease of its own. Time is an order of events: the store ends a lease only
 * after its client's deadline for it (`live`) has passed. A deadline that passes spends one of FAULTS.
 */
#ifndef R
#define R 2
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
/* The sets of requests in shared mode, and of those that have the same owner=. */
#ifndef SHARED
#define SHARED 0
#endif
#ifndef OWNED
#define OWNED 0
#endif
/* Requests that never give up: whoever waits for ever is found. */
#ifndef STAYS
#define STAYS 0
#endif
/* Requests that hold for ever. */
#ifndef FOREVER
#define FOREVER 0
#endif
/* Requests of one client: who has left is gone for the others, before its key is deleted. Not who has an owner=. */
#ifndef ONE
#define ONE 0
#endif
#define in(set, r)     (((set) >> (r)) & 1)
#define exclusive(r)   (!in(SHARED, r))
#define mates(r, x)    ((r) != (x) && in(OWNED, r) && in(OWNED, x))
#define conflict(r, x) (exclusive(r) || exclusive(x))

/* What a request is at. */
#define ASK 0
#define WAIT 1
#define HOLD 2
#define LEAVE 3
#define OVER 4

/* The store: when a key was made (0: there is none), and its place in the queue; markers; leases. */
byte made[R], order[R];
bool marker[R], lease[R];
byte revision;

/* The clients. */
typedef View { byte made[R]; byte order[R] };
View view[R];
byte phase[R], token[R];
bool live[R], unsure[R];
bool again[R];                     /* there is a reason to look, though the view is up to date */
byte faults = FAULTS;
byte greatest;                     /* the largest token of an exclusive holder so far */

/* On its way for any time: a request that is carried out late. */
#define NOTHING 0
#define ENTER 1
#define JOIN 2
byte late_what, late_who, late_mate, late_made, late_mine;

hidden byte x, y, m, me, clear;     /* scratch */

/* ---- What the store does --------------------------------------------------------------------------------------- */

inline store_enter(r) {
  if
  :: lease[r] && !made[r] && (!marker[r]) ->
     revision++;
     made[r] = revision;
     order[r] = revision
  :: else
  fi
}

/* Beside the owner's other request m, if its key is the one that was seen to hold, and one's own is the same still. */
inline store_join(r, mate, seen, mine) {
  if
#ifdef OLD_JOIN
  :: lease[r] && made[r] && made[r] == mine ->
     order[r] = seen
#else
  :: lease[r] && made[r] && made[r] == mine && made[mate] == seen ->
     order[r] = order[mate]
#endif
  :: else
  fi
}

inline store_delete(r) {
  made[r] = 0;
  order[r] = 0
}

inline store_leave(r) {
  store_delete(r);
#ifndef NO_MARKER
  if
  :: unsure[r] -> marker[r] = true
  :: else
  fi
#endif
}

/* ---- What a client knows ----------------------------------------------------------------------------------------- */

inline hear(r) {
  x = 0;
  do
  :: x < R ->
     view[r].made[x] = made[x];
     view[r].order[x] = order[x];
     x++
  :: else -> break
  od;
  x = 0
}

#if R > 2
#define differs2(r) || view[r].made[2] != made[2] || view[r].order[2] != order[2]
#else
#define differs2(r)
#endif
#define news(r) (view[r].made[0] != made[0] || view[r].order[0] != order[0] || \
                 view[r].made[1] != made[1] || view[r].order[1] != order[1] differs2(r))

#ifdef OLD_PASS
#define passed(x) (in(ONE, me) && in(ONE, x) && phase[x] >= LEAVE)
#else
#define passed(x) (in(ONE, me) && in(ONE, x) && phase[x] >= LEAVE && !in(OWNED, x))
#endif
/* The others of its client look when a request leaves. */
inline pass_on(r) {
  x = 0;
  do
  :: x < R ->
     if
     :: x != r && in(ONE, r) && in(ONE, x) && phase[x] == WAIT -> again[x] = true
     :: else
     fi;
     x++
  :: else -> break
  od;
  x = 0
}

/* clear: in the view of me no earlier request stands in the way of q. */
inline find_free(q) {
  clear = 1;
  x = 0;
  do
  :: x < R ->
     if
     :: x != q && view[me].made[x] && conflict(q, x) && view[me].order[x] < view[me].order[q] && !passed(x) -> clear = 0
     :: else
     fi;
     x++
  :: else -> break
  od;
  x = 0
}

/* m: a request of the same owner that holds in this view and beside which r may get in; else R. */
inline find_mate(r) {
  me = r;
  m = R;
  y = 0;
  do
  :: y < R ->
     if
     :: mates(r, y) && view[r].made[y] && view[r].order[y] < view[r].order[r] && (exclusive(y) || !exclusive(r)) ->
        find_free(y);
        if
        :: clear || view[r].order[y] != view[r].made[y] -> m = y
        :: else
        fi
     :: else
     fi;
     y++
  :: else -> break
  od;
  y = 0
}

inline begin_body(r, with) {
#ifndef OLD_OWN_KEY
  assert(live[r]);
#endif
  assert(lease[r] && made[r]);
  x = 0;
  do
  :: x < R ->
     assert(x == r || phase[x] != HOLD || !conflict(r, x) || mates(r, x));
     x++
  :: else -> break
  od;
  x = 0;
  token[r] = with;
  if
  :: exclusive(r) ->
     /* A mate may come later, with the same token as the first. */
     assert(with >= greatest);
     greatest = with
  :: else
  fi;
  phase[r] = HOLD;
  printf("request %d holds with token %d\n", r, with)
}

/* ---- The clients ---------------------------------------------------------------------------------------------------- */

inline answered() { printf("answer: heard\n") }
inline lost_answer() { faults--; printf("the answer is lost\n") }
inline lost_request() { faults--; printf("the request is lost\n") }

inline ask(r) {
  if
  :: printf("request %d enters\n", r);
     store_enter(r);
     if
     :: answered();
        hear(r);
        phase[r] = (made[r] -> WAIT : LEAVE)
     :: faults > 0 -> lost_answer(); unsure[r] = true
     fi
  :: faults > 0 -> printf("request %d enters\n", r); lost_request(); unsure[r] = true
  :: faults > 0 && late_what == NOTHING ->
     printf("request %d enters\n", r);
     faults--;
     unsure[r] = true;
     late_what = ENTER; late_who = r;
     printf("it is late\n")
  fi
}

inline look(r) {
  find_mate(r);                    /* and me is r */
  if
#ifdef OLD_OWN_KEY
  /* etcd's RWMutex (#16221): whoever sees its predecessor go believes that it holds. */
  :: find_free(r); if :: clear -> begin_body(r, view[r].order[r]) :: else fi
#else
  :: view[r].made[r] == 0 ->
     printf("request %d sees that its key is gone\n", r);
     phase[r] = LEAVE
  :: view[r].made[r] && m < R && view[r].order[r] == view[r].made[r] && live[r] ->
     printf("request %d joins request %d\n", r, m);
     late_mate = m; late_made = view[r].made[m]; late_mine = view[r].made[r];
     if
     :: store_join(r, m, view[r].made[m], view[r].made[r]);
        if
        :: answered();
           hear(r);
           if
           :: order[r] != made[r] && made[r] && live[r] -> begin_body(r, order[r])
           :: else -> again[r] = true        /* its mate is gone */
           fi
        :: faults > 0 -> lost_answer(); unsure[r] = true; again[r] = true
        fi
     :: faults > 0 -> lost_request(); unsure[r] = true; again[r] = true
     :: faults > 0 && late_what == NOTHING ->
        faults--;
        unsure[r] = true;
        again[r] = true;
        late_what = JOIN; late_who = r;
        printf("it is late\n")
     fi;
     if
     :: late_what == JOIN
     :: else -> late_mate = 0; late_made = 0; late_mine = 0
     fi
  :: view[r].made[r] && view[r].order[r] != view[r].made[r] && live[r] -> begin_body(r, view[r].order[r])
  :: view[r].made[r] && m == R && view[r].order[r] == view[r].made[r] && live[r] ->
     find_free(r);
     if
     :: clear -> begin_body(r, view[r].order[r])
     :: else
     fi
  :: else
#endif
  fi;
  m = 0; me = 0; clear = 0
}

#ifdef OLD_RW
/* A writer waits for the last one before it alone. */
inline look_old(r) {
  x = 0; m = R;
  do
  :: x < R ->
     if
     :: x != r && last[r] == x + 1 && view[r].made[x] -> m = x
     :: else
     fi;
     x++
  :: else -> break
  od;
  x = 0;
  if
  :: m == R && live[r] && view[r].made[r] -> begin_body(r, view[r].order[r])
  :: else
  fi;
  m = 0
}
byte last[R];
inline find_last(r) {
  x = 0; y = 0;
  do
  :: x < R ->
     if
     :: x != r && view[r].made[x] && view[r].order[x] < view[r].order[r] && view[r].order[x] > y && conflict(r, x) ->
        y = view[r].order[x]; last[r] = x + 1
     :: else
     fi;
     x++
  :: else -> break
  od;
  x = 0; y = 0
}
#else
#define look_old(r) look(r)
#define find_last(r) skip
#endif

/* The last but one of those that must go before r holds, in its view, plus one; 0 if r stands next. With three requests
 * these are two at most, so it is the first. A key that joined has an order before others: such a name is followed. */
#if R > 2 && !defined(OLD_RW)
byte far[R];
inline find_far(r) {
  x = 0; y = 0; m = 0; far[r] = 0;
  do
  :: x < R ->
     if
     :: view[r].made[x] && view[r].order[x] != view[r].made[x] -> y = R; m = R + 1
     :: else
     fi;
     if
     :: x != r && view[r].made[x] && view[r].made[r] && conflict(r, x) && view[r].order[x] < view[r].order[r] && m <= R ->
        y++;
        if
        :: m == 0 || view[r].order[x] < view[r].order[m - 1] -> m = x + 1
        :: else
        fi
     :: else
     fi;
     x++
  :: else -> break
  od;
  if
  :: m <= R && y > 1 && !in(OWNED, r) -> far[r] = m
  :: else
  fi;
#ifdef OLD_SIGNAL
  /* The request in front, in whichever mode: a reader is told of its turn when a reader that has it, too, is gone. */
  x = 0; y = 0;
  do
  :: x < R ->
     if
     :: x != r && view[r].made[x] && view[r].order[x] < view[r].order[r] && view[r].order[x] > y ->
        y = view[r].order[x]; far[r] = x + 1
     :: else
     fi;
     x++
  :: else -> break
  od;
#endif
  x = 0; y = 0; m = 0
}
#define told(r) (far[r] == 0 || made[far[r] - 1] != view[r].made[far[r] - 1] || made[r] != view[r].made[r])
#else
#define find_far(r) skip
#define told(r) true
#endif

#ifdef OLD_SLEEP
/* etcd's Mutex (#19597): a waiter is woken when its predecessor is gone, and not before. (For two requests.) */
#define awake(r) (!made[1 - (r)])
#else
#define awake(r) true
#endif

inline depart(r) {
  if
  :: printf("request %d leaves\n", r);
     store_leave(r);
     if
     :: answered(); phase[r] = OVER
     :: faults > 0 -> lost_answer()
     fi
  :: faults > 0 -> printf("request %d leaves\n", r); lost_request()
  fi
}

proctype client(byte r) {
  do
  :: atomic { phase[r] == ASK -> ask(r); if :: phase[r] == WAIT -> find_last(r); find_far(r); look_old(r) :: else fi }
  :: atomic { !in(STAYS, r) && (phase[r] == ASK || phase[r] == WAIT) -> printf("request %d gives up\n", r); phase[r] = LEAVE }
  :: atomic { phase[r] == WAIT && ((news(r) && told(r)) || again[r]) && awake(r) ->
       again[r] = false;
       hear(r);
       find_far(r);
       look_old(r) }
  :: atomic { phase[r] == HOLD && !in(FOREVER, r) -> phase[r] = LEAVE; pass_on(r) }
  :: atomic { phase[r] == LEAVE -> depart(r) }
  /* The client's deadline passes: a body is told at that moment. A renewal that is answered brings a new one. */
  :: atomic { faults > 0 && live[r] && phase[r] != OVER ->
       faults--;
       live[r] = false;
       printf("request %d lets its deadline pass\n", r);
       if :: phase[r] == HOLD -> phase[r] = LEAVE :: else fi }
  :: atomic { !live[r] && lease[r] && phase[r] != OVER -> live[r] = true; again[r] = (phase[r] == WAIT); printf("request %d renews\n", r) }
#if !defined(OLD_OWN_KEY) && !defined(OLD_SLEEP)
  :: atomic { !lease[r] && !live[r] && (phase[r] == ASK || phase[r] == WAIT) ->
       printf("request %d hears that its lease has ended\n", r);
       phase[r] = LEAVE }
#endif
  :: atomic { phase[r] == OVER -> break }
  od
}

/* An obstacle of r's holds for ever. */
#define stands(r, x) ((x) != (r) && in(FOREVER, x) && made[x] && conflict(r, x) && order[x] < order[r])
#if R > 2
#define blocked(r) (stands(r, 0) || stands(r, 1) || stands(r, 2))
#else
#define blocked(r) (stands(r, 0) || stands(r, 1))
#endif

active proctype store() {
  byte r;
  do
  :: atomic { late_what == ENTER ->
       printf("request %d enters late\n", late_who);
       store_enter(late_who);
       late_what = NOTHING; late_who = 0 }
  :: atomic { late_what == JOIN ->
       printf("request %d joins late\n", late_who);
       store_join(late_who, late_mate, late_made, late_mine);
       late_what = NOTHING; late_who = 0; late_mate = 0; late_made = 0; late_mine = 0 }
  :: atomic { lease[0] && !live[0] -> lease[0] = false; store_delete(0); printf("the lease of request 0 ends\n") }
  :: atomic { lease[1] && !live[1] -> lease[1] = false; store_delete(1); printf("the lease of request 1 ends\n") }
#if R > 2
  :: atomic { lease[2] && !live[2] -> lease[2] = false; store_delete(2); printf("the lease of request 2 ends\n") }
#endif
  /* When nothing more happens, nobody waits and no key is left: but for those that hold for ever, and who waits
   * for them and has its key. */
  :: atomic { timeout ->
       r = 0;
       do
       :: r < R ->
          assert(phase[r] == OVER || (phase[r] == HOLD && in(FOREVER, r)) || (FOREVER && phase[r] == WAIT && made[r] && blocked(r)));
          assert(phase[r] != OVER || !made[r]);
          r++
       :: else -> break
       od;
       break }
  od
}

init {
  atomic {
    byte r = 0;
    do
    :: r < R -> live[r] = true; lease[r] = true; run client(r); r++
    :: else -> break
    od
  }
}
